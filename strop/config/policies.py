"""The policies of rollout.agent.policies: several players, each with weights of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from strop.config.schema.policies import AgentPolicyConfig
from strop.config.schema.rollout import AgentConfig
from strop.config.typed import ConfigError, build

KEY = "actor_rollout_ref.rollout.agent.policies"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class AgentPolicy:
    """One of several policies of a run."""

    name: str
    """Also that of its player, and what a call may name as its `model`."""
    train: bool
    path: str | None

    @property
    def role(self) -> str:
        """The folder of its weights in a checkpoint."""
        return f"{ROLE_PREFIX}{self.name}"


ROLE_PREFIX = "actor_"


def agent_policies(agent: AgentConfig) -> list[AgentPolicy]:
    """The policies in the order of the configuration; empty: the run has one policy. ValueError if they are
    written wrongly."""
    found = []
    for name, section in agent.policies.items():
        if not _NAME.fullmatch(str(name)):
            raise ValueError(f"{name!r} cannot name a policy. Use 1 to 64 letters, digits, _ and -.")
        if section is not None and not isinstance(section, Mapping):
            raise ValueError(f"{name}={section!r} must be a section with train and path, or {{}}.")
        try:
            settings = build(AgentPolicyConfig, section or {})
        except ConfigError as problem:
            raise ValueError(" ".join(f"{name}.{line}" for line in problem.problems)) from problem
        found.append(AgentPolicy(str(name), settings.train, settings.path))
    return found


def other_size(policy: AgentPolicy, given: tuple[int, float], own: tuple[int, float]) -> str | None:
    """Why the adapter of a policy's folder does not fit to the run; None: it does. Rank and alpha of both."""
    if given == own:
        return None
    return (
        f"{policy.path} has lora_rank={given[0]} and lora_alpha={given[1]:g}, the run has {own[0]} and "
        f"{own[1]:g}. All policies have the same: set those of the folder."
    )


def engine_adapters(agent: AgentConfig) -> dict[str, str | None]:
    """By policy, the adapter that a request of the engine names. The first policy is the module itself."""
    found: dict[str, str | None] = {}
    for policy in agent_policies(agent):
        found[policy.name] = policy.name if found else None
    return found


def players_of(agent: AgentConfig) -> list[str]:
    """The players of an episode; empty: an episode has one. Every policy is a player."""
    return [str(name) for name in agent.policies] or agent.players
