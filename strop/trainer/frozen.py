"""Frozen models with machines of their own: what is made there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from strop.backends.single import SingleBackend
from strop.config.pools import pools
from strop.models.build import compute_dtype
from strop.ranks import Ranks
from strop.rewards.model import HeadModel, load_model
from strop.trainer.backends import BackendMaker
from strop.trainer.build import device_of, reference_here, temperature_of


def frozen_models(config: Any) -> dict[str, Callable[[], Any]]:
    """How each of them is made, by role."""
    makers: dict[str, Callable[[Any], Any]] = {"reference": make_reference, "reward": make_reward_model}
    return {role: partial(makers[role], config) for role in pools(config) if role in makers}


def make_reference(config: Any) -> SingleBackend:
    make = BackendMaker(device_of(config.trainer.device), 1, Ranks(), temperature_of(config))
    return reference_here(config, make)


def make_reward_model(config: Any) -> HeadModel:
    reward, device = config.reward_model, device_of(config.trainer.device)
    return load_model(reward, device=device, dtype=compute_dtype(reward.model.fsdp_config.dtype, device))
