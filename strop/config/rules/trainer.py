"""Rules of the `trainer` section."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from strop.catalog import TRACKERS
from strop.config.derived import device_count, resource_pools
from strop.config.rules.findings import Findings, error, warning
from strop.extras import install_command
from strop.registry import did_you_mean

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.model import CheckpointConfig
    from strop.config.schema.ppo import PpoConfig
    from strop.config.schema.roots import TrainingConfig
    from strop.config.schema.trainer import TrainerConfig

UNSUPPORTED_TRACKERS = ("clearml", "vemlp_wandb")
"""Trackers of verl that Strop does not have."""


def any_training(loaded: Loaded[TrainingConfig]) -> Findings:
    """What every kind of training has: resume, trackers, a device."""
    trainer = loaded.config.trainer
    if not trainer.default_local_dir.strip():
        yield error(
            "trainer.default_local_dir", "empty: checkpoints would go to the working folder. Name a folder."
        )
    if trainer.resume_mode == "resume_path":
        path = trainer.resume_from_path
        if not path or "global_step_" not in path:
            yield error(
                "trainer.resume_from_path",
                f"trainer.resume_mode=resume_path needs a global_step_N folder, got {path!r}.",
            )
    elif trainer.resume_from_path and "trainer.resume_mode" not in loaded.set_by_user:
        yield warning("trainer.resume_from_path", "no effect: set trainer.resume_mode=resume_path to use it.")
    names = [trainer.logger] if isinstance(trainer.logger, str) else trainer.logger
    for name in names:
        yield from _tracker(name)
    yield from _checkpointing_named_twice(loaded)
    if trainer.device == "npu":
        yield error("trainer.device", "Ascend devices are not supported. Use cuda or cpu.")


def _checkpointing_named_twice(loaded: Loaded[TrainingConfig]) -> Findings:
    """enable_gradient_checkpointing and gradient_checkpointing of one model agree, if both are set."""
    for key, mode in loaded.set_by_user.items():
        section, _, name = key.rpartition(".")
        switch = loaded.set_by_user.get(f"{section}.enable_gradient_checkpointing")
        if name != "gradient_checkpointing" or mode is None or switch is None:
            continue
        if switch != (mode != "none"):
            yield error(
                key,
                f"{mode}, but {section}.enable_gradient_checkpointing={str(switch).lower()}. Leave out "
                "one of the two.",
            )


def _tracker(name: str) -> Findings:
    if name in UNSUPPORTED_TRACKERS:
        yield warning("trainer.logger", f"{name} is left out; there are {', '.join(TRACKERS.names())}.")
        return
    if name not in TRACKERS:
        yield error("trainer.logger", f"unknown tracker {name!r}.{did_you_mean(name, TRACKERS.names())}")
        return
    library = TRACKERS.entry(name).facts["library"]
    if library and importlib.util.find_spec(library) is None:
        yield error(
            "trainer.logger",
            f"{name} is not installed here: {install_command(library)}, or take it out of the list.",
            about_machine=True,
        )


def record_steps(loaded: Loaded[PpoConfig]) -> Findings:
    """A recorded step is written by one process that samples and trains in turn."""
    trainer = loaded.config.trainer
    ahead = trainer.async_training.enable or trainer.async_training.partial_rollout
    if trainer.record_steps and (device_count(trainer) > 1 or ahead):
        yield error(
            "trainer.record_steps",
            "a step is stored by one process that samples and learns in turn. Record with one device, "
            "without trainer.async_training.",
        )


def saved_weights(key: str, checkpoint: CheckpointConfig) -> Findings:
    """Checkpoints have the weights, in one form or the other."""
    saved = checkpoint.save_contents
    if not {"model", "hf_model"} & set(saved):
        yield warning(f"{key}.save_contents", f"{saved}: checkpoints have no weights. Add model or hf_model.")


def checkpoints(loaded: Loaded[PpoConfig]) -> Findings:
    """A run without save_freq writes no checkpoint; what is saved has the weights."""
    actor = loaded.config.actor_rollout_ref.actor
    yield from saved_weights("actor_rollout_ref.actor.checkpoint", actor.checkpoint)
    trainer = loaded.config.trainer
    if trainer.save_freq <= 0:
        yield warning(
            "trainer.save_freq", f"{trainer.save_freq}: no checkpoint is ever written, not even at the end."
        )
    elif trainer.test_freq <= 0 or not loaded.config.data.val_files:
        yield from no_best_checkpoint(trainer, "data.val_files and trainer.test_freq")


def no_best_checkpoint(trainer: TrainerConfig, needed: str) -> Findings:
    """Without a validation no checkpoint is the best one."""
    if trainer.best_metric:
        yield warning(
            "trainer.best_metric",
            f"{trainer.best_metric} has no effect, because no step is validated. Set {needed}.",
        )


def runtime(loaded: Loaded[PpoConfig]) -> Findings:
    """Pools of models need Ray. `rules.rollout` checks the pool of engines."""
    config = loaded.config
    if config.trainer.runtime != "local":
        return
    models = [f"the {role} model" for role in resource_pools(config) if role != "rollout"]
    if models:
        yield error(
            "trainer.runtime",
            f"local, but {' and '.join(models)} asks for machines of its own. Set ray (or auto).",
        )
