"""python -m strop.trainer.main_sft key=value ...: supervised fine-tuning from a configuration.

`run_supervised` is also what main_rm and main_dpo call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.config.commandline import parse
from strop.config.compose import load
from strop.errors import answer
from strop.runtime.launch import torchrun_sizes
from strop.shared.process_setup import prepare_process

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.roots import AnySupervisedConfig
    from strop.preflight.report import PreflightReport
    from strop.ranks import Ranks


def run(arguments: Sequence[str]) -> int:
    return run_supervised("sft_trainer", arguments)


def run_supervised(root: str, arguments: Sequence[str]) -> int:
    """Run the program of `root`: sft_trainer, rm_trainer or dpo_trainer."""
    options = parse(arguments)
    loaded = load(root, [*torchrun_sizes(), *options.overrides], options.config, options.search)
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


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
