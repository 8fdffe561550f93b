"""python -m strop.trainer.main_generation key=value ...: answers for a file of prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from strop.config.commandline import parse
from strop.config.compose import load
from strop.errors import answer
from strop.shared.process_setup import prepare_process


def run(arguments: Sequence[str]) -> int:
    """Compose, examine, generate."""
    options = parse(arguments)
    loaded = load("generation", options.overrides, options.config, options.search)
    from strop.preflight.examine import require

    require(loaded)
    from strop.inference.generation import generate

    sys.stdout.write(f"{generate(loaded.config)}\n")
    return 0


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
