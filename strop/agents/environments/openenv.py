"""Environments behind an OpenEnv server (openenv-core): one WebSocket session per episode.

The policy's answer is one field of the action, `message` unless environment_kwargs.action_key names another;
environment_kwargs.action has further fields. The observation is environment_kwargs.observation_key of what
the server sends, or all of it as JSON.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from strop.agents.environments.text import Observed, TextEnvironmentAgent, text_of
from strop.agents.episode import EpisodeError
from strop.extras import require

KEY = "rollout.environment"
ARGUMENTS: Mapping[str, Any] = {"action_key": "message", "observation_key": None, "action": {}, "reset": {}}
HIDDEN = ("reward", "done", "metadata")


def openenv_agent(url: str, arguments: Mapping[str, object]) -> TextEnvironmentAgent:
    """The loop of openenv:URL."""
    unknown = sorted(set(arguments) - set(ARGUMENTS))
    if unknown:
        raise ValueError(
            f"rollout.environment_kwargs has {unknown}; {KEY}=openenv:{url} takes {', '.join(ARGUMENTS)}."
        )
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise ValueError(f"{KEY}=openenv:{url}: expected the address of a server, as http://host:8000.")
    library = require("openenv.core", extra="environments", why=f"{KEY}=openenv:{url}")
    settings: dict[str, Any] = {**ARGUMENTS, **arguments}

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[OpenEnvSession]:
        async with library.GenericEnvClient(base_url=url) as client:
            yield OpenEnvSession(client, settings)

    return TextEnvironmentAgent(opened, f"{KEY}=openenv:{url}")


class OpenEnvSession:
    """One episode."""

    def __init__(self, client: Any, settings: Mapping[str, Any]) -> None:
        self.client = client
        self.settings = settings

    async def reset(self, seed: int, options: dict[str, object]) -> Observed:
        return self._observed(await self.client.reset(seed=seed, **self.settings["reset"]))

    async def step(self, action: str) -> Observed:
        content = {**self.settings["action"], self.settings["action_key"]: action}
        return self._observed(await self.client.step(content))

    def _observed(self, result: Any) -> Observed:
        observation = result.observation
        key = self.settings["observation_key"]
        if key is None:
            shown = {name: value for name, value in observation.items() if name not in HIDDEN}
            text = json.dumps(shown, ensure_ascii=False, default=str)
        elif key in observation:
            text = text_of(observation[key])
        else:
            raise EpisodeError(
                f"the observation has no {key!r} (rollout.environment_kwargs.observation_key); it has "
                f"{', '.join(observation)}."
            )
        return Observed(text, float(result.reward or 0.0), bool(result.done))
