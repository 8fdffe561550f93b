"""From keyword arguments to a configuration: keys by their full name, or by their last word."""

from __future__ import annotations

from collections.abc import Mapping

from strop.config.compose import reload
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.reflect import keys as schema_keys
from strop.registry import did_you_mean

SECTIONS = (
    "actor_rollout_ref.actor.optim.",
    "actor_rollout_ref.actor.fsdp_config.",
    "actor_rollout_ref.actor.policy_loss.",
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.model.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.",
    "algorithm.",
    "data.",
    "trainer.",
    "",
)
"""Where a short form is looked for, in this order."""


def policy_config(given: Mapping[str, object]) -> PpoConfig:
    """The configuration with these keys."""
    paths = [key.path for key in schema_keys(PpoConfig)]
    changes = {full_name(name, paths): value for name, value in given.items()}
    config: PpoConfig = reload("ppo_trainer", {}, changes).config
    return config


def full_name(name: str, paths: list[str]) -> str:
    """The full name of a key."""
    if name in paths:
        return name
    for section in SECTIONS:
        if section + name in paths:
            return section + name
    short = sorted({path.rpartition(".")[2] for path in paths})
    raise ValueError(
        f"Policy has no setting {name!r}.{did_you_mean(name, [*short, *paths])} Settings are the keys of a "
        "training run, by their full name or their last word (docs/configuration.md)."
    )
