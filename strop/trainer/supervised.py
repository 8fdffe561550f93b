"""What main_sft, main_rm and main_dpo do: compose the configuration, examine it, train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.config.commandline import parse
from strop.config.compose import load

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.roots import AnySupervisedConfig
    from strop.preflight.report import PreflightReport
    from strop.ranks import Ranks


def run_supervised(root: str, arguments: Sequence[str]) -> int:
    """Run the program of `root`: sft_trainer, rm_trainer or dpo_trainer."""
    asked = parse(arguments)
    loaded = load(root, asked.overrides, asked.config, asked.search)
    from strop.preflight.examine import examine, require
    from strop.shared.start import TrainingProgram, start

    module = f"strop.trainer.main_{root.removesuffix('_trainer')}"
    return start(loaded, TrainingProgram(module, require, examine, _train), arguments)


def _train(loaded: Loaded[AnySupervisedConfig], ranks: Ranks, report: PreflightReport | None) -> None:
    from strop.supervised.build import build_supervised_trainer

    datasets = None
    if report is not None:
        datasets = report.datasets
    build_supervised_trainer(loaded, datasets, ranks).fit()
