"""python -m strop.trainer.main_dpo key=value ...: direct preference optimisation from a configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from strop.errors import answer
from strop.shared.process_setup import prepare_process
from strop.trainer.main_sft import run_supervised


def run(arguments: Sequence[str]) -> int:
    return run_supervised("dpo_trainer", arguments)


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
