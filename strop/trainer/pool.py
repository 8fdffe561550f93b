"""Roles on machines of their own: what a rollout replica is made of, and whom ranks ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.catalog import ENGINES
from strop.config.engine import engine_name, replica_count
from strop.models.build import build_critic
from strop.ranks import Ranks
from strop.rollout.base import Engine
from strop.runtime.frozen import FarReference, FarScorer
from strop.runtime.learners import FarBackend
from strop.runtime.replica import Recipe
from strop.runtime.transports import ByFile, ByGroup, ByStore, Receivers, Transport


def recipe_for(config: Any, settings: Mapping[str, Any]) -> Recipe:
    """`settings` are those of the engine."""
    rollout = config.actor_rollout_ref.rollout
    return Recipe(
        engine=engine_name(rollout),
        model=config.actor_rollout_ref.model,
        settings=dict(settings),
        dtype=config.actor_rollout_ref.actor.fsdp_config.dtype,
        device=config.trainer.device,
        holds_weights=bool(ENGINES.entry(engine_name(rollout)).facts["own_weights"]),
    )


def replicas_for(config: Any, ranks: Ranks, longest: int) -> Engine:
    """The engine over the replicas that whoever started this rank has prepared."""
    from strop.rollout.source import source_of
    from strop.runtime.ray_pool import pool_of_this_run
    from strop.runtime.replicas import Replicas

    rollout = config.actor_rollout_ref.rollout
    pool = pool_of_this_run()
    assert pool.size == replica_count(rollout)
    source = source_of(config.actor_rollout_ref.model.path, longest)
    return Replicas(source, pool, transport_for(config, pool), ranks)


def transport_for(config: Any, pool: Receivers) -> Transport:
    """How rank 0 brings new weights to the replicas."""
    from strop.trainer.build import device_of

    settings = config.actor_rollout_ref.rollout.checkpoint_engine
    megabytes = settings.update_weights_bucket_megabytes
    if settings.backend == "nccl":
        return ByGroup(pool, megabytes, device_of(config.trainer.device), config.actor_rollout_ref.nccl_timeout)
    if settings.backend == "file":
        folder = settings.engine_kwargs.get("folder") or Path(config.trainer.default_local_dir) / "weights_on_their_way"
        return ByFile(pool, megabytes, Path(folder).expanduser().absolute())
    return ByStore(pool, megabytes)


def far_reference(ranks: Ranks) -> FarReference:
    from strop.runtime.ray_frozen import RayCopies

    return FarReference(RayCopies("reference", "actor_rollout_ref.ref.nnodes"), ranks)


def far_reward_model(ranks: Ranks) -> FarScorer:
    from strop.runtime.ray_frozen import RayCopies

    return FarScorer(RayCopies("reward", "reward_model.enable_resource_pool"), ranks)


def far_critic(config: Any, ranks: Ranks, temperature: float, total_steps: int) -> FarBackend:
    from strop.runtime.ray_learners import RayLearners

    key = "critic.nnodes"
    module = build_critic(config.critic.model, weights=False)
    return FarBackend(RayLearners("critic", key), ranks, module, temperature, total_steps, key)
