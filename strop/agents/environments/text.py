"""Text environments: the policy's answer is the action, the environment's observation the next user message.

The first observation stands behind the last user message of the row. Rewards of steps are rewards of turns,
so the return of an episode is the sum of its rewards, and no scorer is called.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from strop.agents.episode import Episode, EpisodeError, within
from strop.rewards.signatures import own_copy


@dataclass(frozen=True)
class Observed:
    """What an environment says after a reset or a step."""

    text: str
    reward: float = 0.0
    done: bool = False
    extras: dict[str, float] = field(default_factory=dict)
    """Numbers for dumps and validation metrics."""


class TextEnvironment(Protocol):
    """One episode of an environment."""

    async def reset(self, seed: int, options: dict[str, object]) -> Observed:
        """Begin; `options` is the row's extra_info."""
        ...

    async def step(self, action: str) -> Observed:
        """Take the policy's answer."""
        ...


OpenEnvironment = Callable[[], AbstractAsyncContextManager[TextEnvironment]]


class TextEnvironmentAgent:
    """The loop `environment` over text environments."""

    def __init__(self, opened: OpenEnvironment, name: str) -> None:
        """`opened` makes the environment of one episode; `name` is that of errors."""
        self._opened = opened
        self._name = name

    async def run(self, episode: Episode) -> None:
        limit = episode.context.limits.call_timeout
        opened = AsyncExitStack()
        try:
            start = opened.enter_async_context(self._opened())
            environment = await within(start, limit, f"{self._name}: start")
            await self._play(episode, environment)
        finally:
            await within(opened.aclose(), limit, f"{self._name}: close")

    async def _play(self, episode: Episode, environment: TextEnvironment) -> None:
        start = environment.reset(seed_of(episode), own_copy(episode.prompt.extra_info))
        observed = await self._ask(episode, start, "reset")
        if observed.text:
            episode.open(with_observation(episode, observed.text))
        episode.score = 0.0
        while not observed.done:
            answer = await episode.answer()
            observed = await self._ask(episode, environment.step(answer.text), "step")
            episode.reward(observed.reward)
            episode.extras.update(observed.extras)
            if observed.done or not episode.may_go_on():
                break
            if not episode.tell({"role": "user", "content": observed.text}):
                break
        if not episode.assistant_turns:
            raise EpisodeError(f"{self._name}: the episode was over before the first action.")

    async def _ask(self, episode: Episode, work: Awaitable[Observed], what: str) -> Observed:
        limit = episode.context.limits.call_timeout
        observed = await episode.waiting(within(work, limit, f"{self._name}: {what}"))
        episode.counts[f"environment_{what}s"] += 1
        if not math.isfinite(observed.reward):
            raise EpisodeError(f"{self._name}: {what} gave the reward {observed.reward}.")
        return observed


def seed_of(episode: Episode) -> int:
    """The seed of a row: extra_info.seed, else its number, so that all samples of a row start alike."""
    seed = episode.prompt.extra_info.get("seed")
    return episode.prompt.index if seed is None else int(seed)


def with_observation(episode: Episode, text: str) -> list[dict[str, object]]:
    """The messages of the row with an observation behind the last one of the user."""
    messages = [dict(message) for message in episode.messages]
    for message in reversed(messages):
        if message["role"] == "user" and isinstance(message["content"], str):
            message["content"] = f"{message['content']}\n\n{text}".strip()
            return messages
    return [*messages, {"role": "user", "content": text}]


def text_of(observation: object) -> str:
    """An observation as text: a string as it is, other objects as Python writes them."""
    return observation if isinstance(observation, str) else str(observation)
