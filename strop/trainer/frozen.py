"""Models with machines of their own: what is made there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from strop.backends.base import Backend
from strop.backends.single import SingleBackend
from strop.config.pools import devices_of, pools
from strop.models.build import compute_dtype
from strop.ranks import Ranks
from strop.registry import load_plugins
from strop.rewards.model import HeadModel, load_model
from strop.runtime.learners import Make
from strop.runtime.local import joined
from strop.trainer.backends import BackendMaker
from strop.trainer.build import critic_here, device_of, reference_here, temperature_of


def frozen_models(config: Any) -> dict[str, Callable[[], Any]]:
    """How each of those that never learn is made, by role."""
    makers: dict[str, Callable[[Any], Any]] = {"reference": make_reference, "reward": make_reward_model}
    return {role: partial(makers[role], config) for role in pools(config) if role in makers}


def make_reference(config: Any) -> SingleBackend:
    make = BackendMaker(device_of(config.trainer.device), 1, Ranks(), temperature_of(config))
    return reference_here(config, make)


def make_reward_model(config: Any) -> HeadModel:
    reward, device = config.reward_model, device_of(config.trainer.device)
    return load_model(reward, device=device, dtype=compute_dtype(reward.model.fsdp_config.dtype, device))


def learning_models(config: Any) -> dict[str, Make]:
    """How each of those that learn is made, by role."""
    return {"critic": partial(learning_critic, config)} if "critic" in pools(config) else {}


@contextmanager
def learning_critic(config: Any, total_steps: int) -> Iterator[Backend]:
    """One learner's part of it."""
    load_plugins(config.plugins)
    torch.manual_seed(config.trainer.seed)
    device, world = device_of(config.trainer.device), devices_of(config.critic)
    alone = nullcontext(Ranks())
    with alone if world == 1 else joined(world, device, timeout=float(config.actor_rollout_ref.nccl_timeout)) as ranks:
        yield critic_here(config, BackendMaker(device, total_steps, ranks, temperature_of(config)))
