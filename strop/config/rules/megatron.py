"""Rules of strategy=megatron: sizes that do not multiply, and what it does not do."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.config.derived import async_plan, device_count, has_critic, has_reference, resource_pools
from strop.config.megatron import (
    adapted_outside_layers,
    devices_per_copy,
    divides_reward_model,
    megatron_schedule_keys,
)
from strop.config.rules.findings import Findings, error, warning
from strop.config.schema.megatron import MegatronConfig
from strop.config.schema.supervised import RmConfig
from strop.extras import install_command

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.actor import ActorConfig, RefConfig
    from strop.config.schema.critic import CriticConfig
    from strop.config.schema.model import ModelConfig, OptimConfig
    from strop.config.schema.ppo import PpoConfig
    from strop.config.schema.roots import AnySupervisedConfig

ONE_PART = (
    "reward_model.megatron.tensor_model_parallel_size=1 and "
    "reward_model.megatron.pipeline_model_parallel_size=1"
)
"""The reward model is not divided."""


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
    """Keys of sizes by which the other backends divide a model, with their values."""
    scalar: bool = False
    """It has a scalar head: a critic or reward model."""


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
    if divides_reward_model(config):
        reward = config.reward_model
        yield MegatronRole(
            "reward_model", reward.megatron, reward.model, "reward_model.model", devices, (), scalar=True
        )
    for key, section, model, model_key, count in found:
        if section.strategy == "megatron":
            sizes = (
                (f"{key}.tensor_parallel_size", section.tensor_parallel_size),
                (f"{key}.ulysses_sequence_parallel_size", section.ulysses_sequence_parallel_size),
            )
            yield MegatronRole(key, section.megatron, model, model_key, count, sizes, key == "critic")


def supervised_role(config: AnySupervisedConfig) -> Iterator[MegatronRole]:
    """The model of sft, rm or dpo, if it is divided by Megatron."""
    if config.model.strategy == "megatron":
        sizes = (
            ("tensor_parallel_size", config.tensor_parallel_size),
            ("ulysses_sequence_parallel_size", config.ulysses_sequence_parallel_size),
        )
        devices = device_count(config.trainer)
        scalar = isinstance(config, RmConfig)
        yield MegatronRole("model", config.model.megatron, config.model, "model", devices, sizes, scalar)


def megatron(loaded: Loaded[PpoConfig]) -> Findings:
    """Every model that is divided by Megatron."""
    config = loaded.config
    actor = config.actor_rollout_ref.actor
    chosen = loaded.set_by_user
    yield from megatron_schedule("actor_rollout_ref.actor.optim", actor.optim, actor.strategy, chosen)
    yield from megatron_schedule("critic.optim", config.critic.optim, config.critic.strategy, chosen)
    yield from role_findings(list(megatron_roles(config)))
    if actor.strategy == "megatron":
        yield from own_balance("actor_rollout_ref.actor", actor.aux_loss_coef)
    section = actor.megatron
    divided = section.tensor_model_parallel_size * section.pipeline_model_parallel_size
    if divided > 1 and actor.strategy != "megatron":
        yield warning(
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
            f"the megatron section has no effect with strategy={actor.strategy}. Set "
            "actor_rollout_ref.actor.strategy=megatron.",
        )
    yield from _reward_model(config)


def _reward_model(config: PpoConfig) -> Findings:
    """A reward model that is divided over the ranks: all of them score all samples together."""
    reward = config.reward_model
    if not divides_reward_model(config):
        if reward.enable and devices_per_copy(reward.megatron) > 1:
            yield warning(
                "reward_model.megatron.tensor_model_parallel_size",
                f"no effect with reward_model.strategy={reward.strategy}: every process holds the whole "
                "reward model. Set reward_model.strategy=megatron.",
            )
        return
    if reward.enable_resource_pool:
        yield error(
            "reward_model.enable_resource_pool",
            "true: every device of the pool holds a whole reward model. Set "
            f"{ONE_PART}, or reward_model.enable_resource_pool=false.",
        )
    if config.custom_reward_function.path:
        yield error(
            "custom_reward_function.path",
            f"{config.custom_reward_function.path} with a reward model that is divided over the ranks "
            "(reward_model.megatron): every rank would call it for all samples. Leave it out, or set "
            f"{ONE_PART}.",
        )
    if async_plan(config).concurrent:
        yield error(
            "reward_model.megatron.tensor_model_parallel_size",
            "samples are scored while the model trains (trainer.async_training), and ranks cannot share a "
            "divided reward model meanwhile. Set the sizes of reward_model.megatron to 1.",
        )


def role_findings(roles: Sequence[MegatronRole]) -> Findings:
    """Sizes, and what the backend does not do; the library, if any model needs it."""
    for role in roles:
        yield from _sizes(role, role.settings)
        yield from _unsupported(role, role.settings)
    if roles and importlib.util.find_spec("megatron") is None:
        yield error(
            f"{roles[0].key}.strategy",
            f"megatron needs the package megatron-core, which is not installed here. Install it with: "
            f"{install_command('megatron')}",
            about_machine=True,
        )


def own_balance(key: str, coefficient: float) -> Findings:
    """The load-balancing loss of transformers sums over all layers, which may be on different stages."""
    if coefficient > 0:
        yield error(
            f"{key}.aux_loss_coef",
            f"{coefficient:g} is the load-balancing loss of transformers over all layers. "
            f"{key}.strategy=megatron has that of Megatron, for each layer: set {key}.aux_loss_coef=0 and "
            f"{key}.megatron.override_transformer_config.moe_aux_loss_coeff, with "
            "moe_router_load_balancing_type=aux_loss.",
        )


def megatron_schedule(key: str, optim: OptimConfig, strategy: str, chosen: Container[str]) -> Findings:
    """Keys of Megatron's schedule with another backend, or together with an lr_scheduler_type that the user
    chose. `chosen`: keys that the user set."""
    given = megatron_schedule_keys(optim)
    if given and strategy != "megatron":
        message = f"no effect with strategy={strategy}; set {key}.lr_scheduler_type."
        yield warning(f"{key}.{given[0]}", message)
        return
    named = [f"{key}.{name}" for name in ("lr_scheduler", "lr_scheduler_type") if f"{key}.{name}" in chosen]
    if given and named and optim.lr_scheduler_type != "constant":
        yield error(
            f"{key}.{given[0]}",
            f"{getattr(optim, given[0])} with {named[0]}={optim.lr_scheduler_type}: both are schedules. Take "
            "one of them out.",
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
            f"larger {role.key}.megatron.expert_model_parallel_size.",
        )
    virtual = sizes.virtual_pipeline_model_parallel_size
    if virtual is not None and virtual > 1 and stages == 1:
        yield error(
            f"{role.key}.megatron.virtual_pipeline_model_parallel_size",
            f"{virtual} needs {role.key}.megatron.pipeline_model_parallel_size of at least 2. Set null.",
        )


def _unsupported(role: MegatronRole, settings: MegatronConfig) -> Findings:
    """What the backend does not do."""
    adapted = bool(role.model.lora_rank or role.model.lora_adapter_path)
    if adapted and role.key != "actor_rollout_ref.ref":  # the reference is the actor without adapters
        yield from _adapters(role, settings)
    if settings.use_dist_checkpointing and not settings.dist_checkpointing_path:
        yield error(
            f"{role.key}.megatron.use_dist_checkpointing",
            f"true, but {role.key}.megatron.dist_checkpointing_path is not set. Set that to the folder of a "
            f"Megatron checkpoint, or this to false: initial weights are those of {role.model_key}.path.",
        )
    elif settings.dist_checkpointing_path and not settings.use_dist_checkpointing:
        yield warning(
            f"{role.key}.megatron.dist_checkpointing_path",
            f"no effect without {role.key}.megatron.use_dist_checkpointing=true: initial weights are those "
            f"of {role.model_key}.path.",
        )
    yield from _balance(role.key, settings)
    if not settings.load_weight:
        yield error(f"{role.key}.megatron.load_weight", "false: a model without weights is of no use here.")
    for key, size in role.other_sizes:
        if size > 1:
            yield error(
                key,
                f"{size} is for strategy=fsdp. Set 1, and {role.key}.megatron.tensor_model_parallel_size.",
            )


def _adapters(role: MegatronRole, settings: MegatronConfig) -> Findings:
    """LoRA: what the adapters of divided layers do not do. preflight/megatron_checks.py reads those of
    lora_adapter_path."""
    if role.model.lora_rank and not role.model.lora_adapter_path:
        yield from _targets(role)
    if role.model.lora_rank and role.model.lora_dropout:
        yield error(
            f"{role.model_key}.lora_dropout",
            f"{role.model.lora_dropout:g} with {role.key}.strategy=megatron: tensor-parallel ranks would "
            f"drop different inputs. Set {role.model_key}.lora_dropout=0, or {role.key}.strategy=fsdp.",
        )
    if role.model.quantization is not None:
        yield error(
            f"{role.model_key}.quantization",
            f"{role.model.quantization} with {role.key}.strategy=megatron: 4-bit weights are not divided. "
            f"Set null, or train on one device with {role.key}.strategy=fsdp.",
        )
    if settings.use_dist_checkpointing:
        yield error(
            f"{role.key}.megatron.use_dist_checkpointing",
            f"true with LoRA ({role.model_key}.lora_rank): a Megatron checkpoint has no adapters. Merge it "
            f"with `strop merge`, set {role.model_key}.path to the result, and set this to false.",
        )


def _targets(role: MegatronRole) -> Findings:
    """Modules outside the layers."""
    model = role.model
    try:
        outside = adapted_outside_layers(model.target_modules, model.exclude_modules, scalar=role.scalar)
    except re.error as problem:
        yield error(
            f"{role.model_key}.target_modules",
            f"{model.target_modules!r} (exclude_modules={model.exclude_modules!r}) is no regular expression: "
            f"{problem}. Set all-linear, a list of names, or a pattern of whole names.",
        )
        return
    if outside:
        yield error(f"{role.model_key}.target_modules", outside_message(role, outside))


def outside_message(role: MegatronRole, modules: Sequence[str]) -> str:
    """Why modules outside the layers cannot have adapters."""
    return (
        f"includes {', '.join(modules)} with {role.key}.strategy=megatron, which has adapters for the "
        f"layers of the decoder only. Leave them out ({role.model_key}.exclude_modules), or set "
        f"{role.key}.strategy=fsdp."
    )


def _balance(key: str, settings: MegatronConfig) -> Findings:
    """Load-balancing losses of megatron-core."""
    given = {**settings.override_mcore_model_config, **settings.override_transformer_config}
    kind = given.get("moe_router_load_balancing_type", "none")
    option = f"{key}.megatron.override_transformer_config.moe_router_load_balancing_type"
    if kind not in ("none", "aux_loss"):
        yield error(
            option,
            f"{kind}: a packed row has many sequences, and routing must not depend on the other tokens. Set "
            "aux_loss or none.",
        )
    elif given.get("moe_aux_loss_coeff") and kind == "none":
        yield warning(
            f"{key}.megatron.override_transformer_config.moe_aux_loss_coeff",
            "no effect, as in verl, without moe_router_load_balancing_type=aux_loss.",
        )
