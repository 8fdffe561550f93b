"""python -m strop.trainer.main_rm key=value ...: a reward model from preferences from a configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from strop.errors import answer
from strop.shared.process_setup import prepare_process
from strop.trainer.main_sft import run_supervised


def run(arguments: Sequence[str]) -> int:
    return run_supervised("rm_trainer", arguments)


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
