"""Which environment `rollout.environment` names, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strop.agents.environments.gym import gym_agent
from strop.agents.environments.openenv import openenv_agent
from strop.agents.environments.verifiers import VerifiersAgent

ENVIRONMENT_AGENT = "environment"
"""Name of the agent loop."""
KINDS: Mapping[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "gym": gym_agent,
    "openenv": openenv_agent,
    "verifiers": VerifiersAgent,
}


def environment_agent(environment: str, arguments: Mapping[str, Any]) -> Any:
    """The agent loop of an environment, as kind:place."""
    kind, _, place = environment.partition(":")
    if kind not in KINDS or not place:
        raise ValueError(
            f"rollout.environment={environment!r}: expected gym:module:Class, openenv:URL or verifiers:NAME."
        )
    return KINDS[kind](place, arguments)


def needs_endpoint(environment: str | None) -> bool:
    """Whether the environment calls the policy over HTTP."""
    return environment is not None and environment.startswith("verifiers:")
