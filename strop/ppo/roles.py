"""The models of a run and the engine's module: in this process, sharded over ranks, or on other machines.

A role with nnodes of its own (rollout replicas, reference, reward model, critic) is built on those machines;
ranks hold a client for it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from strop.backends.base import Backend, MicroBatching, Roles, nothing_to_release
from strop.backends.single import ModuleBackend
from strop.catalog import ENGINES
from strop.compat import conventions
from strop.config.derived import (
    async_plan,
    device_count,
    engine_name,
    has_critic,
    has_reference,
    holds_weights,
    records_experts,
    replica_count,
    resource_pools,
    uses_lora,
)
from strop.config.megatron import training_dtype
from strop.config.schema.actor import ActorConfig
from strop.config.schema.critic import CriticConfig
from strop.config.schema.model import OptimConfig
from strop.config.schema.ppo import PpoConfig
from strop.models.build import (
    allocate,
    build_critic,
    build_policy,
    build_reference,
    build_reward_model,
    compute_dtype,
    language_config,
)
from strop.models.tensor_parallel import Divided, team_of
from strop.ppo.teacher import build_teacher, local_teacher
from strop.ranks import Ranks
from strop.registry import load_plugins
from strop.rewards.model import HeadModel, load_model, pass_sizes
from strop.rollout.base import Engine
from strop.runtime.local import joined
from strop.runtime.remote_backend import BackendFactory, RemoteBackend
from strop.runtime.remote_models import RemoteReference, RemoteTokenScorer
from strop.runtime.rollout_replica import ReplicaSpec
from strop.runtime.weight_transports import (
    BroadcastTransport,
    FileTransport,
    ObjectStoreTransport,
    Transport,
    WeightReceivers,
)
from strop.shared.build import (
    BackendMaker,
    DividedRewardModel,
    WithoutAdapters,
    device_of,
    engine_settings,
    max_model_len,
    tensor_parallel_size,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_roles(
    config: PpoConfig,
    device: torch.device,
    total_steps: int,
    ranks: Ranks | None = None,
    on_out_of_memory: Callable[[], bool] = nothing_to_release,
) -> Roles:
    """Actor, critic, reference and teacher, as the configuration needs them."""
    make = backend_maker(config, device, total_steps, ranks or Ranks(), on_out_of_memory)
    roles = Roles(build_actor(config, make))
    if "critic" in resource_pools(config):
        roles.critic = remote_critic(config, make.ranks, make.temperature, total_steps)
    elif has_critic(config):
        roles.critic = local_critic(config, make)
    if has_reference(config):
        # A reference only needs `forward`.
        roles.reference = cast(Backend, build_reference_role(config, roles.actor, make))
    if config.algorithm.distillation.enable:
        roles.teacher = cast(Backend, build_teacher(config, make))
    return roles


def backend_maker(
    config: PpoConfig,
    device: torch.device,
    total_steps: int,
    ranks: Ranks,
    on_out_of_memory: Callable[[], bool] = nothing_to_release,
) -> BackendMaker:
    """Makes the models of this configuration."""
    temperature = temperature_of(config)
    return BackendMaker(device, total_steps, ranks, temperature, on_out_of_memory, config.algorithm.compat)


def optim_of(config: PpoConfig, section: ActorConfig | CriticConfig, total_steps: int) -> OptimConfig:
    """The optimizer of a model. A schedule that counts updates is as long as all updates of the run."""
    optim = section.optim
    counts_steps = conventions(config.algorithm.compat).schedule_unit == "step"
    if counts_steps or optim.total_training_steps >= 1:
        return optim
    mini_batches = math.ceil(config.data.train_batch_size / section.ppo_mini_batch_size)
    updates = total_steps * mini_batches * section.ppo_epochs
    return dataclasses.replace(optim, total_training_steps=updates)


def build_actor(
    config: PpoConfig, make: BackendMaker, build: Callable[..., PreTrainedModel] = build_policy
) -> ModuleBackend:
    """The policy in training. `build` makes its module."""
    actor = config.actor_rollout_ref.actor
    if actor.freeze_vision_tower:
        build = partial(build, freeze_vision_tower=True)
    return make(
        build,
        config.actor_rollout_ref.model,
        actor.fsdp_config,
        actor.strategy,
        optim_of(config, actor, make.total_steps),
        actor.grad_clip,
        sequence_parallel=actor.ulysses_sequence_parallel_size,
        tensor_parallel=actor.tensor_parallel_size,
        shared_with_engine=not holds_weights(config.actor_rollout_ref.rollout),
        megatron=actor.megatron,
        router_replay=actor.router_replay.mode,
    )


def build_reference_role(
    config: PpoConfig, actor: Backend, make: BackendMaker
) -> WithoutAdapters | RemoteReference | ModuleBackend:
    """The reference: the actor without its LoRA adapters, a client of another machine, or a model here."""
    if uses_lora(config):
        assert isinstance(actor, ModuleBackend)
        return WithoutAdapters(actor)
    if "reference" in resource_pools(config):
        return remote_reference(make.ranks)
    return local_reference(config, make)


def local_critic(config: PpoConfig, make: BackendMaker) -> ModuleBackend:
    """The critic in this process, or sharded over the ranks of `make`."""
    critic = config.critic
    return make(
        build_critic,
        critic.model,
        critic.model.fsdp_config,
        critic.strategy,
        optim_of(config, critic, make.total_steps),
        critic.grad_clip,
        sequence_parallel=critic.ulysses_sequence_parallel_size,
        tensor_parallel=critic.tensor_parallel_size,
        megatron=critic.megatron,
    )


def local_reference(config: PpoConfig, make: BackendMaker) -> ModuleBackend:
    """The frozen reference in this process, or sharded over the ranks of `make`."""
    ref = config.actor_rollout_ref.ref
    model = dataclasses.replace(config.actor_rollout_ref.model, **ref.model)
    return make(
        build_reference,
        model,
        ref.fsdp_config,
        ref.strategy,
        sequence_parallel=ref.ulysses_sequence_parallel_size,
        tensor_parallel=ref.tensor_parallel_size,
        megatron=ref.megatron,
    )


def temperature_of(config: PpoConfig) -> float:
    """Log-probs are those of the distribution that the engine samples from."""
    return config.actor_rollout_ref.rollout.temperature or 1.0


# The rollout engine


def rollout_module(config: PpoConfig, actor: Backend, device: torch.device) -> PreTrainedModel:
    """The module that the engine samples from: that of the actor, or a whole copy in compute precision where
    the actor is sharded or trains while the engine samples. A weight sync fills the copy."""
    rollout = config.actor_rollout_ref.rollout
    needs_copy = async_plan(config).concurrent and not holds_weights(rollout)
    is_whole = actor.ranks.world == 1 and config.actor_rollout_ref.actor.strategy != "megatron"
    if (is_whole and not needs_copy) or rollout.nnodes:
        return cast("PreTrainedModel", actor.module)
    dtype = compute_dtype(training_dtype(config.actor_rollout_ref.actor), device)
    module = build_reference(config.actor_rollout_ref.model, dtype=dtype, weights=False)
    size = tensor_parallel_size(rollout)
    if size > 1:
        module.divided = Divided(module, team_of(actor.ranks.rank, actor.ranks.world, size))
    allocate(module, device)
    return module


class EngineMemory:
    """Device memory that the rollout engine kept while it sleeps. Backends are built before the engine, so
    the engine is set later."""

    engine: Engine | None = None

    def release(self) -> bool:
        """Make the engine release it; whether there was any. For `BackendSettings.on_out_of_memory`."""
        return self.engine is not None and self.engine.release_memory()


def replica_spec(config: PpoConfig) -> ReplicaSpec | None:
    """How a rollout replica on another machine is built; None: the engine runs in the ranks."""
    if "rollout" not in resource_pools(config):
        return None
    rollout = config.actor_rollout_ref.rollout
    return ReplicaSpec(
        engine=engine_name(rollout),
        model=config.actor_rollout_ref.model,
        settings=engine_settings(rollout, record_experts=records_experts(config)),
        dtype=training_dtype(config.actor_rollout_ref.actor),
        device=config.trainer.device,
        holds_weights=bool(ENGINES.entry(engine_name(rollout)).facts["own_weights"]),
        folder=os.getcwd(),
    )


def replica_engine(config: PpoConfig, module: PreTrainedModel, ranks: Ranks) -> Engine:
    """The engine over the rollout replicas that the starter of this rank has prepared."""
    from strop.rollout.external import model_source
    from strop.runtime.ray.replica_pool import connect_replica_pool
    from strop.runtime.replica_engine import ReplicaEngine

    rollout = config.actor_rollout_ref.rollout
    refuse_lost_head(config, module)
    pool = connect_replica_pool()
    assert pool.size == replica_count(rollout)
    path = config.actor_rollout_ref.model.path
    assert path is not None, "the preflight refuses a run without a model"
    source = model_source(path, max_model_len(rollout))
    return ReplicaEngine(source, pool, weight_transport(config, pool), ranks)


def refuse_lost_head(config: PpoConfig, module: PreTrainedModel) -> None:
    """Replicas build the model from its configuration, before any weights are read. An output head that only
    the loaded weights show would be left out there: they would sample from the embedding."""
    settings = config.actor_rollout_ref.model
    nnodes = config.actor_rollout_ref.rollout.nnodes
    if not module.config.tie_word_embeddings and language_config(settings).tie_word_embeddings:
        raise ValueError(
            f"actor_rollout_ref.rollout.nnodes={nnodes}: {settings.path} has an output head of its own, "
            "although its config.json ties it to the embedding; rollout replicas would sample without it. "
            "Set actor_rollout_ref.model.override_config.tie_word_embeddings=false."
        )


def weight_transport(config: PpoConfig, pool: WeightReceivers) -> Transport:
    """How rank 0 sends new weights to the replicas."""
    settings = config.actor_rollout_ref.rollout.checkpoint_engine
    megabytes = settings.update_weights_bucket_megabytes
    if settings.backend == "nccl":
        timeout = config.actor_rollout_ref.nccl_timeout
        return BroadcastTransport(pool, megabytes, device_of(config.trainer.device), timeout)
    if settings.backend == "file":
        default = Path(config.trainer.default_local_dir) / "weights_on_their_way"
        folder = settings.engine_kwargs.get("folder") or default
        return FileTransport(pool, megabytes, Path(folder).expanduser().absolute())
    return ObjectStoreTransport(pool, megabytes)


# Clients of models on other machines


def remote_reference(ranks: Ranks) -> RemoteReference:
    """A client of the reference models of this run."""
    from strop.runtime.ray.model_actors import RayModelCopies

    return RemoteReference(RayModelCopies("reference", "actor_rollout_ref.ref.nnodes"), ranks)


def remote_reward_model(ranks: Ranks) -> RemoteTokenScorer:
    """A client of the reward models of this run."""
    from strop.runtime.ray.model_actors import RayModelCopies

    return RemoteTokenScorer(RayModelCopies("reward", "reward_model.enable_resource_pool"), ranks)


def remote_critic(config: PpoConfig, ranks: Ranks, temperature: float, total_steps: int) -> RemoteBackend:
    """A client of the critic of this run."""
    from strop.runtime.ray.model_actors import RayTrainingWorkers

    key = "critic.nnodes"
    module = build_critic(config.critic.model, weights=False)
    return RemoteBackend(RayTrainingWorkers("critic", key), ranks, module, temperature, total_steps, key)


# What those machines build


def frozen_models(config: PpoConfig) -> dict[str, Callable[[], ModuleBackend | HeadModel]]:
    """How each remote model without training is built, by role."""
    makers: Mapping[str, Callable[[PpoConfig], ModuleBackend | HeadModel]] = {
        "reference": make_reference,
        "teacher": make_teacher,
        "reward": make_reward_model,
    }
    found: dict[str, Callable[[], ModuleBackend | HeadModel]] = {}
    for role in resource_pools(config):
        if role in makers:
            found[role] = partial(makers[role], config)
    return found


def make_reference(config: PpoConfig) -> ModuleBackend:
    """The reference on a machine of its own."""
    make = backend_maker(config, device_of(config.trainer.device), 1, Ranks())
    return local_reference(config, make)


def make_teacher(config: PpoConfig) -> ModuleBackend:
    """The teacher of a distillation on a machine of its own."""
    return local_teacher(config, backend_maker(config, device_of(config.trainer.device), 1, Ranks()))


def make_reward_model(config: PpoConfig, device: torch.device | None = None) -> HeadModel:
    """The reward model on a machine of its own, or in this process on `device`."""
    reward = config.reward_model
    device = device or device_of(config.trainer.device)
    fsdp = reward.model.fsdp_config
    return load_model(
        reward,
        device=device,
        dtype=compute_dtype(fsdp.dtype, device),
        offload=fsdp.param_offload or fsdp.offload_policy,
    )


def divided_reward_model(config: PpoConfig, device: torch.device, ranks: Ranks) -> DividedRewardModel:
    """The reward model over all ranks."""
    reward = config.reward_model
    make = backend_maker(config, device, 1, ranks)
    backend = make(
        build_reward_model, reward.model, reward.model.fsdp_config, "megatron", megatron=reward.megatron
    )
    rows, max_tokens = pass_sizes(reward)
    return DividedRewardModel(backend, MicroBatching(rows=rows, max_tokens=max_tokens))


def learning_models(config: PpoConfig) -> dict[str, BackendFactory]:
    """How each remote model that trains is built, by role."""
    if "critic" not in resource_pools(config):
        return {}
    return {"critic": partial(learning_critic, config)}


@contextmanager
def learning_critic(config: PpoConfig, total_steps: int) -> Iterator[Backend]:
    """The critic in one of the processes that train it."""
    load_plugins(config.plugins)
    torch.manual_seed(config.trainer.seed)
    device = device_of(config.trainer.device)
    world = device_count(config.critic)
    if world == 1:
        yield local_critic(config, backend_maker(config, device, total_steps, Ranks()))
        return
    with joined(world, device, timeout=float(config.actor_rollout_ref.nccl_timeout)) as ranks:
        yield local_critic(config, backend_maker(config, device, total_steps, ranks))
