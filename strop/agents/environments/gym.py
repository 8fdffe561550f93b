"""Environments with the interface of Gymnasium whose actions and observations are text:

    reset(seed=..., options=...) -> observation, info
    step(text) -> observation, reward, terminated, truncated, info

The older form with one `done` works too. Calls run in daemon threads: a step that is slow or hangs delays
neither other episodes nor the end of the program.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import AsyncIterator, Mapping
from typing import Any

from strop.agents.call_threads import AbandonableThreads
from strop.agents.environments.text import Observed, TextEnvironmentAgent, text_of
from strop.agents.episode import EpisodeError
from strop.extras import require
from strop.registry import load_attribute

KEY = "rollout.environment"


def gym_agent(place: str, arguments: Mapping[str, object]) -> TextEnvironmentAgent:
    """The loop of gym:MODULE:CLASS, gym:FILE.py:CLASS or gym:ID (a registered environment of Gymnasium)."""
    make = _maker(place)
    threads = AbandonableThreads("strop-environment")

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[GymEnvironment]:
        made = await threads.call(make, dict(arguments))
        try:
            yield GymEnvironment(made, place, threads)
        finally:
            close = getattr(made, "close", None)
            if close is not None:
                await threads.call(close, {})

    return TextEnvironmentAgent(opened, f"{KEY}=gym:{place}")


def _maker(place: str) -> Any:
    """The class or function that makes an environment."""
    path, colon, name = place.rpartition(":")
    if not colon:
        gymnasium = require("gymnasium", extra="environments", why=f"{KEY}=gym:{place}")

        def make(**arguments: object) -> Any:
            return gymnasium.make(place, **arguments)

        return make
    made = load_attribute(path, name) if path.endswith(".py") else _imported(path, name)
    for method in ("reset", "step"):
        if inspect.isclass(made) and not callable(getattr(made, method, None)):
            raise ValueError(f"{KEY}=gym:{place}: {name} has no method {method!r}.")
    return made


def _imported(path: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{KEY}=gym:{path}:{name} cannot be imported: {error}. Name a module and a class in it, or "
            "gym:path/to/file.py:Class."
        ) from error


class GymEnvironment:
    """One episode."""

    def __init__(self, environment: Any, name: str, threads: AbandonableThreads) -> None:
        self.environment = environment
        self.name = name
        self.threads = threads

    async def reset(self, seed: int, options: dict[str, object]) -> Observed:
        found = await self.threads.call(self.environment.reset, {"seed": seed, "options": options})
        observation = found[0] if isinstance(found, tuple) and len(found) == 2 else found
        return Observed(text_of(observation))

    async def step(self, action: str) -> Observed:
        found = await self.threads.call(functools.partial(self.environment.step, action), {})
        if not isinstance(found, tuple) or len(found) not in (4, 5):
            raise EpisodeError(
                f"{self.name}.step returned {type(found).__name__}; expected (observation, reward, "
                "terminated, truncated, info)."
            )
        observation, reward, *ends, info = found
        extras: dict[str, float] = {}
        for name, value in dict(info or {}).items():
            if isinstance(value, bool | int | float):
                extras[str(name)] = float(value)
        return Observed(text_of(observation), float(reward), any(ends), extras)
