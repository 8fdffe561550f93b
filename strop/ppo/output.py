"""What a reinforcement-learning run writes: its models by their folder in a checkpoint, and its samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from strop.algorithms.ema import EMA
from strop.algorithms.kl import KLController
from strop.backends.base import Roles
from strop.config.compose import Loaded
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.trainer import TrainerConfig
from strop.ppo.episodes.policies import PolicySet
from strop.ppo.pretrain import Pretraining
from strop.run.checkpoint.contents import Stateful
from strop.run.checkpoint.retention import retention_from_trainer
from strop.run.checkpoint.store import Export
from strop.run.sample_table import TokenTexts
from strop.run.samples import SampleWriter
from strop.shared.export import exports
from strop.shared.in_process import RunObserver
from strop.shared.run_output import RunOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_output(
    loaded: Loaded,
    roles: Roles,
    policies: PolicySet | None,
    tokenizer: PreTrainedTokenizerBase,
    total_steps: int,
    average: EMA | None,
    controller: KLController,
    pretraining: Pretraining | None,
    observer: RunObserver | None,
) -> RunOutput:
    """Checkpoints, trackers and dumps of the run."""
    config: PpoConfig = loaded.config
    trainer = config.trainer
    contents = {"actor": config.actor_rollout_ref.actor.checkpoint, "critic": config.critic.checkpoint}
    models: dict[str, Stateful] = {"actor": roles.actor}
    if policies is not None:
        models = dict(policies.states())
        contents |= dict.fromkeys(models, config.actor_rollout_ref.actor.checkpoint)
    if roles.critic is not None:
        models["critic"] = roles.critic
    stateful: dict[str, Stateful] = {"kl": controller}
    if average is not None:
        stateful["ema"] = average
    if pretraining is not None:
        stateful["pretrain_files"] = pretraining.loader
    return RunOutput(
        config,
        loaded.tree(),
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        total_steps=total_steps,
        models=models,
        contents=contents,
        keep=retention_from_trainer(
            max_actor_ckpt_to_keep=trainer.max_actor_ckpt_to_keep,
            max_critic_ckpt_to_keep=trainer.max_critic_ckpt_to_keep,
            max_ckpt_mem_gb=trainer.max_ckpt_mem_gb,
            best_metric=trainer.best_metric,
            remove_previous_ckpt_in_save=trainer.remove_previous_ckpt_in_save,
        ),
        save_freq=trainer.save_freq,
        stateful=stateful,
        exports=lambda: _exports(config, roles, policies, tokenizer, average),
        ranks=roles.actor.ranks,
        samples=sample_writer(trainer, tokenizer) if roles.actor.ranks.is_rank0 else None,
        observer=observer,
    )


def sample_writer(trainer: TrainerConfig, tokenizer: PreTrainedTokenizerBase) -> SampleWriter | None:
    """Keeps samples for the board. It has a copy of the tokenizer, because it decodes in another thread."""
    if trainer.samples_to_keep == 0:
        return None
    directory = Path(trainer.default_local_dir).expanduser()
    return SampleWriter(
        directory, max_samples=trainer.samples_to_keep, texts=TokenTexts.of(copy.deepcopy(tokenizer))
    )


def _exports(
    config: PpoConfig,
    roles: Roles,
    policies: PolicySet | None,
    tokenizer: PreTrainedTokenizerBase,
    average: EMA | None,
) -> Mapping[str, Export]:
    """The folders that transformers loads, where save_contents includes hf_model."""
    if policies is None:
        return exports(config, roles, tokenizer, average)
    if "hf_model" in config.actor_rollout_ref.actor.checkpoint.save_contents:
        return policies.exports(tokenizer)
    return {}
