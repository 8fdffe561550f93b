"""What main_sft, main_rm and main_dpo do: compose, examine, train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.config.commandline import parse
from strop.config.compose import load


def run_supervised(root: str, arguments: Sequence[str]) -> int:
    asked = parse(arguments)
    loaded = load(root, asked.overrides, asked.config, asked.search)
    from strop.trainer.start import start

    return start(loaded, f"strop.trainer.main_{root.removesuffix('_trainer')}", arguments, _train)


def _train(loaded: Any, ranks: Any, report: Any) -> None:
    from strop.trainer.supervised_build import build_supervised_trainer

    build_supervised_trainer(loaded, None if report is None else report.datasets, ranks).fit()
