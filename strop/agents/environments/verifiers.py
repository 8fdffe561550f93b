"""Environments of the library `verifiers` (0.4): its taskset gives tasks and rewards, its harness runs the
agent, and the policy answers through the endpoint of the run, so every call is recorded token by token.

A row chooses a task by extra_info.task, else by its number. The prompt of the row is not used: the harness
writes its own. environment_kwargs are fields of verifiers' EnvConfig (taskset, agent, timeout ...).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from strop.agents.episode import Episode, EpisodeError
from strop.extras import require

KEY = "rollout.environment"
PLAIN_CHAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Of roles that name no harness, where the taskset ships none: a chat without tools, in a process of this
machine. Verifiers' own default gives the model a shell in a sandbox of its cloud."""


class VerifiersAgent:
    """The loop `environment` over an environment of verifiers."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        why = f"{KEY}=verifiers:{name}"
        self.library = require("verifiers.v1", extra="environments", why=why)
        self._loaders = require("verifiers.v1.utils.loaders", extra="environments", why=why)
        try:
            self.environment = self._loaders.load_environment(self._settings(name, arguments))
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{why} cannot be loaded with {dict(arguments)}: {type(error).__name__}: {error}. Is its "
                "package installed?"
            ) from error
        self.name = f"verifiers:{name}"
        self._tasks: list[Any] = []
        self._more: Iterator[Any] | None = None
        """Further tasks of a taskset without end."""
        self._serving = contextlib.AsyncExitStack()
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()

    def _settings(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Verifiers' configuration of the environment."""
        given = {**arguments, "taskset": {**arguments.get("taskset", {}), "id": name}}
        config = self._loaders.resolve_env_config(given)
        if self._loaders.default_harness_id(name) == name:
            return config
        for role, value in config:
            if isinstance(value, self.library.AgentConfig) and value.harness is None:
                given[role] = {**PLAIN_CHAT, **given.get(role, {})}
        return self._loaders.resolve_env_config(given)

    async def run(self, episode: Episode) -> None:
        await self._start()
        endpoint = episode.context.endpoint
        assert endpoint is not None, "rollout.environment=verifiers starts an endpoint"
        number = episode.prompt.extra_info.get("task")
        task = self._task(episode.prompt.index if number is None else int(number))
        # The library reads the key from a variable, so each episode has one of its own while it runs.
        variable = f"STROP_EPISODE_KEY_{next(self._numbers)}"
        async with endpoint.session(episode) as session:
            os.environ[variable] = session.key
            try:
                client = self.library.EvalClientConfig(
                    base_url=f"{endpoint.address}/v1", api_key_var=variable
                )
                context = self.library.ModelContext(
                    client=client, model="policy", sampling=self.library.SamplingConfig()
                )
                played = await episode.waiting(self.environment.run_episode(task, context))
            finally:
                del os.environ[variable]
            try:
                session.raise_failure()
            except EpisodeError as error:
                if error.__cause__ is None:  # no call was made: the environment knows why
                    self._raise_failure(played)
                raise
        self._raise_failure(played)
        self._take_rewards(episode, played)

    async def close(self) -> None:
        """End the servers of the environment."""
        await self._serving.aclose()

    async def _start(self) -> None:
        """Read the tasks and start the servers of the environment, once."""
        async with self._starting:
            if self._tasks:
                return
            await self._serving.enter_async_context(self.environment.serving())
            taskset = self.environment.taskset
            if taskset.bounded:
                self._tasks = list(taskset)
            else:
                self._more = iter(taskset)
                self._tasks = [next(self._more)]
            if not self._tasks:
                raise ValueError(f"{KEY}={self.name} has no tasks.")

    def _task(self, number: int) -> Any:
        """The task of this number; after the last one the first again."""
        while self._more is not None and number >= len(self._tasks):
            self._tasks.append(next(self._more))
        return self._tasks[number % len(self._tasks)]

    def _raise_failure(self, played: Any) -> None:
        """Raise the first error of the environment or of its traces, if the episode failed."""
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if not played.ok:
            first = errors[0] if errors else None
            said = f"{first.type}: {first.message}" if first is not None else "no reason given"
            raise EpisodeError(f"{self.name} failed: {said}")

    def _take_rewards(self, episode: Episode, played: Any) -> None:
        """The sum of the rewards of its traces is the score; metrics go to the dumps."""
        episode.score = float(sum(trace.reward for trace in played.traces))
        for trace in played.traces:
            for name, value in trace.metrics.items():
                if value is not None:
                    episode.extras[str(name)] = float(value)
