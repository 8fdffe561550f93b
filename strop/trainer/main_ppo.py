"""python -m strop.trainer.main_ppo key=value ...: reinforcement learning from a configuration."""

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
    from strop.config.schema.ppo import PpoConfig
    from strop.preflight.report import PreflightReport
    from strop.ranks import Ranks
    from strop.shared.start import RemoteModels


def run(arguments: Sequence[str]) -> int:
    """Compose the configuration, examine it, train."""
    options = parse(arguments)
    root = "ppo_trainer"
    if (options.config or "").startswith("ppo_megatron_trainer"):
        root = "ppo_megatron_trainer"
    loaded = load(root, [*torchrun_sizes(), *options.overrides], options.config, options.search)
    from strop.preflight.examine import examine, require
    from strop.shared.start import TrainingProgram, start

    program = TrainingProgram("strop.trainer.main_ppo", require, examine, _train, _remote_models)
    return start(loaded, program, arguments)


def _train(loaded: Loaded[PpoConfig], ranks: Ranks, report: PreflightReport | None) -> None:
    from strop.ppo.build import build_ppo
    from strop.replay.recording import trainer_class

    build_ppo(loaded, ranks, trainer_class(loaded.config)).fit()


def _remote_models(config: PpoConfig) -> RemoteModels:
    from strop.ppo.roles import frozen_models, learning_models, replica_spec
    from strop.shared.start import RemoteModels

    return RemoteModels(replica_spec(config), frozen_models(config), learning_models(config))


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
