"""Rules of strategy=megatron: sizes that do not multiply, and what it does not do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.config.derived import device_count, has_critic, has_reference, resource_pools
from strop.config.megatron import megatron_schedule_keys
from strop.config.rules.findings import Findings, error, warning
from strop.config.schema.megatron import MegatronConfig
from strop.extras import install_command

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.actor import ActorConfig, RefConfig
    from strop.config.schema.critic import CriticConfig
    from strop.config.schema.model import ModelConfig, OptimConfig
    from strop.config.schema.ppo import PpoConfig


@dataclass(frozen=True)
class MegatronRole:
    """A model of a run with strategy=megatron."""

    key: str
    """Of its section."""
    settings: MegatronConfig
    model: ModelConfig
    model_key: str
    devices: int
    other_sizes: tuple[tuple[str, int], ...]
    """Sizes by which the other backends divide a model."""


def megatron_roles(config: PpoConfig) -> Iterator[MegatronRole]:
    """The models of a run with strategy=megatron."""
    group = config.actor_rollout_ref
    pools = resource_pools(config)
    devices = device_count(config.trainer)
    found: list[tuple[str, ActorConfig | RefConfig | CriticConfig, ModelConfig, str, int]] = []
    found.append(("actor_rollout_ref.actor", group.actor, group.model, "actor_rollout_ref.model", devices))
    if has_reference(config):
        # On machines of its own every copy of the reference is whole.
        own = 1 if "reference" in pools else devices
        found.append(("actor_rollout_ref.ref", group.ref, group.model, "actor_rollout_ref.model", own))
    if has_critic(config):
        own = device_count(config.critic) if "critic" in pools else devices
        found.append(("critic", config.critic, config.critic.model, "critic.model", own))
    for key, section, model, model_key, count in found:
        if section.strategy == "megatron":
            sizes = (
                ("tensor_parallel_size", section.tensor_parallel_size),
                ("ulysses_sequence_parallel_size", section.ulysses_sequence_parallel_size),
            )
            yield MegatronRole(key, section.megatron, model, model_key, count, sizes)


def megatron(loaded: Loaded[PpoConfig]) -> Findings:
    """Every model that is divided by Megatron."""
    config = loaded.config
    actor = config.actor_rollout_ref.actor
    yield from megatron_schedule("actor_rollout_ref.actor.optim", actor.optim, actor.strategy)
    yield from megatron_schedule("critic.optim", config.critic.optim, config.critic.strategy)
    roles = list(megatron_roles(config))
    for role in roles:
        yield from _sizes(role, role.settings)
        yield from _unsupported(role, role.settings)
    if actor.strategy == "megatron" and actor.aux_loss_coef > 0:
        yield error(
            "actor_rollout_ref.actor.aux_loss_coef",
            f"{actor.aux_loss_coef:g}: strategy=megatron has no load-balancing loss yet. Set 0, or "
            "strategy=fsdp.",
        )
    if roles and importlib.util.find_spec("megatron") is None:
        yield error(
            f"{roles[0].key}.strategy",
            f"megatron needs the package megatron-core, which is not installed here. Install it with: "
            f"{install_command('megatron')}",
            about_machine=True,
        )
    section = actor.megatron
    divided = section.tensor_model_parallel_size * section.pipeline_model_parallel_size
    if divided > 1 and actor.strategy != "megatron":
        yield warning(
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
            f"the megatron section has no effect with strategy={actor.strategy}. Set strategy=megatron.",
        )
    reward = config.reward_model
    if reward.enable and reward.megatron.tensor_model_parallel_size > 1:
        yield warning(
            "reward_model.megatron.tensor_model_parallel_size",
            "no effect: every process holds the whole reward model.",
        )


def megatron_schedule(key: str, optim: OptimConfig, strategy: str) -> Findings:
    """Keys of Megatron's schedule with another backend, or together with lr_scheduler_type."""
    given = megatron_schedule_keys(optim)
    if given and strategy != "megatron":
        yield warning(f"{key}.{given[0]}", f"no effect with strategy={strategy}; set lr_scheduler_type.")
    elif given and optim.lr_scheduler_type != "constant":
        yield error(
            f"{key}.{given[0]}",
            f"{getattr(optim, given[0])} with lr_scheduler_type={optim.lr_scheduler_type}: both are "
            "schedules. Set lr_decay_style, or take the keys of Megatron's schedule out.",
        )


def _sizes(role: MegatronRole, sizes: MegatronConfig) -> Findings:
    """Sizes and devices."""
    tensor = sizes.tensor_model_parallel_size
    stages = sizes.pipeline_model_parallel_size
    context = sizes.context_parallel_size
    product = tensor * stages * context
    if role.devices % product:
        fitting = [size for size in range(1, role.devices + 1) if role.devices % size == 0]
        yield error(
            f"{role.key}.megatron.tensor_model_parallel_size",
            f"{tensor} x pipeline_model_parallel_size={stages} x context_parallel_size={context} is "
            f"{product}, which does not divide the {role.devices} devices. The product may be one of "
            f"{fitting}.",
        )
        return
    per_stage = role.devices // stages
    experts = sizes.expert_model_parallel_size
    if per_stage % experts:
        fitting = [size for size in range(1, per_stage + 1) if per_stage % size == 0]
        yield error(
            f"{role.key}.megatron.expert_model_parallel_size",
            f"{experts} does not divide the {per_stage} devices of a pipeline stage. Set one of {fitting}.",
        )
    if sizes.expert_tensor_parallel_size not in (None, 1):
        yield error(
            f"{role.key}.megatron.expert_tensor_parallel_size",
            f"{sizes.expert_tensor_parallel_size}: the matrices of an expert are not divided. Set 1 and a "
            "larger expert_model_parallel_size.",
        )
    virtual = sizes.virtual_pipeline_model_parallel_size
    if virtual is not None and virtual > 1 and stages == 1:
        yield error(
            f"{role.key}.megatron.virtual_pipeline_model_parallel_size",
            f"{virtual} needs pipeline_model_parallel_size of at least 2. Set null.",
        )


def _unsupported(role: MegatronRole, settings: MegatronConfig) -> Findings:
    """What the backend does not do."""
    if role.model.lora_rank or role.model.lora_adapter_path:
        yield error(
            f"{role.model_key}.lora_rank",
            f"{role.key}.strategy=megatron does not train LoRA adapters. Set lora_rank=0, or strategy=fsdp.",
        )
    if settings.use_dist_checkpointing:
        yield error(
            f"{role.key}.megatron.use_dist_checkpointing",
            "true: initial weights are read from the Hugging Face folder of model.path. Set false.",
        )
    if not settings.load_weight:
        yield error(f"{role.key}.megatron.load_weight", "false: a model without weights is of no use here.")
    for name, size in role.other_sizes:
        if size > 1:
            yield error(
                f"{role.key}.{name}",
                f"{size} is for strategy=fsdp. Set 1, and {role.key}.megatron.tensor_model_parallel_size.",
            )
