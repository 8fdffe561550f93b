"""Rules of tensor parallelism, sequence parallelism and offload, in training and in the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.derived import (
    device_count,
    engine_name,
    has_critic,
    has_local_teacher,
    has_reference,
    holds_weights,
    resource_pools,
    uses_lora,
)
from strop.config.rules.findings import Findings, error, warning

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.actor import ActorConfig, RefConfig
    from strop.config.schema.critic import CriticConfig
    from strop.config.schema.model import FsdpConfig, ModelConfig
    from strop.config.schema.ppo import PpoConfig
    from strop.config.schema.supervised import SupervisedConfig, SupervisedModelConfig

ENGINE_SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def tensor_parallel(
    key: str, section: ActorConfig | CriticConfig | SupervisedConfig, model: ModelConfig, devices: int
) -> Findings:
    """What tensor-parallel training of one model does not support. `key`: its tensor_parallel_size."""
    size = section.tensor_parallel_size
    ulysses = section.ulysses_sequence_parallel_size
    if size > 1 and ulysses > 1:
        yield error(
            key,
            f"{size} with ulysses_sequence_parallel_size={ulysses}: ranks share matrices or rows, not both. "
            "Set one of them to 1.",
        )
    if size > 1 and (model.lora_rank or model.lora_adapter_path):
        yield error(key, f"{size} does not go together with LoRA. Set it to 1.")
    if devices % size:
        yield error(key, f"{size} does not divide the {devices} devices.")


def tensor_parallel_training(loaded: Loaded[PpoConfig]) -> Findings:
    """Tensor parallelism of the actor and of the critic."""
    config = loaded.config
    group = config.actor_rollout_ref
    devices = device_count(config.trainer)
    yield from tensor_parallel(
        "actor_rollout_ref.actor.tensor_parallel_size", group.actor, group.model, devices
    )
    critic = config.critic
    if "critic" in resource_pools(config):
        devices = device_count(critic)
    yield from tensor_parallel("critic.tensor_parallel_size", critic, critic.model, devices)


def expert_parallel(
    key: str,
    section: ActorConfig | RefConfig | CriticConfig | SupervisedModelConfig,
    fsdp: FsdpConfig,
    model: ModelConfig,
    devices: int,
) -> Findings:
    """What expert-parallel training of one model does not support. `key`: that of its fsdp_config."""
    size = fsdp.expert_parallel_size
    if size == 1:
        return
    # The critic's fsdp_config is below critic.model, its megatron section is not.
    owner = key.removesuffix(".fsdp_config").replace("critic.model", "critic")
    key = f"{key}.expert_parallel_size"
    if section.strategy == "megatron":
        yield error(
            key, f"{size} is for strategy=fsdp. Set 1, and {owner}.megatron.expert_model_parallel_size."
        )
        return
    if model.lora_rank or model.lora_adapter_path:
        yield error(key, f"{size} does not go together with LoRA. Set it to 1.")
    ranks = devices
    if fsdp.fsdp_size > 0:
        ranks = min(fsdp.fsdp_size, devices)
    if ranks % size:
        fitting = [one for one in range(1, ranks + 1) if ranks % one == 0]
        yield error(
            key,
            f"{size} does not divide the {ranks} devices that share one copy of the weights. Set one of "
            f"{fitting}.",
        )


def expert_parallel_training(loaded: Loaded[PpoConfig]) -> Findings:
    """Expert parallelism of actor, reference and critic."""
    config = loaded.config
    group = config.actor_rollout_ref
    devices = device_count(config.trainer)
    for name, section in (("actor", group.actor), ("ref", group.ref)):
        fsdp = section.fsdp_config
        if fsdp.expert_parallel_size > 1 and section.tensor_parallel_size > 1:
            yield error(
                f"actor_rollout_ref.{name}.fsdp_config.expert_parallel_size",
                f"{fsdp.expert_parallel_size} with tensor_parallel_size={section.tensor_parallel_size}: "
                "ranks share matrices or experts, not both. Set one of them to 1.",
            )
        key = f"actor_rollout_ref.{name}.fsdp_config"
        yield from expert_parallel(key, section, fsdp, group.model, devices)
    critic = config.critic
    if "critic" in resource_pools(config):
        devices = device_count(critic)
    key = "critic.model.fsdp_config"
    yield from expert_parallel(key, critic, critic.model.fsdp_config, critic.model, devices)


def shard_groups(key: str, strategy: str, fsdp: FsdpConfig, tensor: int, devices: int) -> Findings:
    """The ranks divide into groups of fsdp_size, and a group into `tensor` parts of each matrix. `key`: that
    of the fsdp_config of one model."""
    size = fsdp.fsdp_size
    if devices == 1 or strategy == "megatron" or size == -1 or size >= devices:
        return
    if size < 1 or devices % size:
        fitting = [one for one in range(1, devices) if devices % one == 0]
        yield error(
            f"{key}.fsdp_size",
            f"{size} does not divide the {devices} devices. Set -1 for all of them, or one of {fitting}.",
        )
    elif size % tensor:
        yield error(
            f"{key}.fsdp_size",
            f"{size}: tensor_parallel_size={tensor} does not divide the {size} devices that share one copy "
            "of the weights. Set -1, or a multiple of it.",
        )


def sharding(loaded: Loaded[PpoConfig]) -> Findings:
    """Groups of ranks that share the weights of actor, reference, teacher and critic, where these exist."""
    config = loaded.config
    actor = config.actor_rollout_ref.actor
    ref = config.actor_rollout_ref.ref
    critic = config.critic
    pools = resource_pools(config)
    found: list[tuple[str, str, ActorConfig | RefConfig | CriticConfig, FsdpConfig]] = [
        ("actor", "actor_rollout_ref.actor", actor, actor.fsdp_config)
    ]
    # On machines of its own, each device has a whole copy of a frozen model. A local teacher has the settings
    # of the reference.
    local_reference = has_reference(config) and not uses_lora(config) and "reference" not in pools
    if local_reference or has_local_teacher(config):
        found.append(("actor", "actor_rollout_ref.ref", ref, ref.fsdp_config))
    if has_critic(config):
        found.append(("critic", "critic.model", critic, critic.model.fsdp_config))
    for role, key, section, fsdp in found:
        devices = device_count(pools.get(role, config.trainer))
        size = section.tensor_parallel_size
        yield from shard_groups(f"{key}.fsdp_config", section.strategy, fsdp, size, devices)


def param_offload(loaded: Loaded[PpoConfig]) -> Findings:
    """On one device the native engine samples from the actor's weights, so they stay on the device."""
    config = loaded.config
    group = config.actor_rollout_ref
    one_device = device_count(config.trainer) == 1
    if one_device and group.actor.fsdp_config.param_offload and not holds_weights(group.rollout):
        yield warning(
            "actor_rollout_ref.actor.fsdp_config.param_offload",
            "no effect on one device: the engine samples from the actor's own weights. "
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true moves the optimizer states to host "
            "memory.",
        )


def tensor_parallel_engine(loaded: Loaded[PpoConfig]) -> Findings:
    """Which engines sample on several devices."""
    rollout = loaded.config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    if size <= 1:
        return
    talks = rollout.multi_turn.enable or rollout.agent.command is not None
    if engine_name(rollout) == "native" and talks:
        yield error(
            ENGINE_SIZE,
            f"{size}: the native engine holds conversations on one device. Set 1, or use vLLM "
            "(actor_rollout_ref.rollout.name=vllm, installed).",
        )
    if engine_name(rollout) == "hf":
        yield error(ENGINE_SIZE, f"{size}: actor_rollout_ref.rollout.name=hf samples on one device.")


def packed_sequences(loaded: Loaded[PpoConfig]) -> Findings:
    """Sequence parallelism needs packed sequences, for the actor and for the critic."""
    group = loaded.config.actor_rollout_ref
    critic = loaded.config.critic
    yield from _packed("actor_rollout_ref", group.model, group.actor.ulysses_sequence_parallel_size)
    yield from _packed("critic", critic.model, critic.ulysses_sequence_parallel_size)


def _packed(path: str, model: ModelConfig, ulysses: int) -> Findings:
    if ulysses > 1 and not model.use_remove_padding:
        yield error(
            f"{path}.model.use_remove_padding",
            f"false, but sequence parallelism of {ulysses} needs packed sequences.",
        )
