"""python -m strop.trainer.main_ppo key=value ...: reinforcement learning from a configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from strop.config.commandline import parse
from strop.config.compose import load
from strop.errors import answer
from strop.trainer.prepare import prepare_process


def run(arguments: Sequence[str]) -> int:
    """Compose, examine, train."""
    asked = parse(arguments)
    root = "ppo_megatron_trainer" if (asked.config or "").startswith("ppo_megatron_trainer") else "ppo_trainer"
    loaded = load(root, asked.overrides, asked.config, asked.search)
    from strop.trainer.start import start

    return start(loaded, "strop.trainer.main_ppo", arguments, _train)


def _train(loaded: Any, ranks: Any, report: Any) -> None:
    from strop.trainer.build import build_ppo

    build_ppo(loaded, ranks).fit()


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
