"""Agent loops by name: the program that runs the conversation of a row.

A loop is a class with `async def run(self, episode)`, or just such a function. The built-in loops are in the
catalog. Your own loops are registered by a plugin (`@AGENT_LOOPS.register("mine")`), or listed in the YAML of
rollout.agent.agent_loop_config_path:

    - name: math_expression
      _target_: math_expression.py:MathExpression   # relative to the YAML or to the working directory
      step_reward: 0.1                              # further keys are its arguments
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from strop.agents.config_files import load_target, read_agent_file
from strop.agents.episode import Episode
from strop.catalog import AGENT_LOOPS
from strop.registry import did_you_mean

KEY = "rollout.agent.agent_loop_config_path"


class AgentLoop(Protocol):
    """Runs one conversation.

    A loop may have further attributes: `lists_tools` (the chat template shows the tools), `batched` (one
    answer is the whole conversation), and a coroutine `close()` for the end of the run.
    """

    async def run(self, episode: Episode) -> None:
        """Run the conversation of one episode."""
        ...


LoopFactory = Callable[..., Any]
"""A class of loops, or a coroutine function that is the loop itself."""


class FunctionLoop:
    """A coroutine function as a loop."""

    def __init__(self, function: Callable[..., Awaitable[object]], **arguments: object) -> None:
        self._function = functools.partial(function, **arguments)
        self.lists_tools = bool(getattr(function, "lists_tools", False))

    async def run(self, episode: Episode) -> None:
        await self._function(episode)


class SingleTurnAgent:
    """single_turn_agent: one answer. Its rows are sampled in one batch, without an episode each."""

    batched = True

    async def run(self, episode: Episode) -> None:
        await episode.answer()


class AgentLoops:
    """The loops of a run. Each is built when a row first needs it."""

    def __init__(
        self,
        default: str,
        listed: Mapping[str, tuple[LoopFactory, Mapping[str, object]]] | None = None,
    ) -> None:
        """`listed`: name -> (class or function, its arguments)."""
        self.default = default
        self._listed = dict(listed or {})
        self._built: dict[str, AgentLoop] = {}

    @classmethod
    def from_config(cls, default: str, path: str | None) -> AgentLoops:
        """Read the YAML list of further loops."""
        if path is None:
            return cls(default)
        entries = read_agent_file(path, KEY)
        if not isinstance(entries, list):
            raise ValueError(f"{KEY}={path} must hold a list of {{name, _target_, ...}}.")
        listed: dict[str, tuple[LoopFactory, Mapping[str, object]]] = {}
        for number, entry in enumerate(entries, 1):
            where = f"{path}, loop {number}"
            if not isinstance(entry, dict) or not {"name", "_target_"} <= set(entry):
                raise ValueError(f"{where} is {entry!r}; it needs `name` and `_target_`.")
            arguments = dict(entry)
            name = str(arguments.pop("name"))
            target = str(arguments.pop("_target_"))
            if name in listed or name in AGENT_LOOPS:
                raise ValueError(f"{where}: the name {name!r} is taken already. Choose another.")
            listed[name] = (load_target(target, Path(path).parent, where), arguments)
        return cls(default, listed)

    def add(self, name: str, factory: LoopFactory, arguments: Mapping[str, object]) -> None:
        """Add a loop that the configuration describes."""
        if name in self._listed:
            raise ValueError(f"{KEY}: the name {name!r} is taken already. Choose another.")
        self._listed[name] = (factory, arguments)

    def names(self) -> list[str]:
        """Return the names of all loops."""
        return sorted({*AGENT_LOOPS.names(), *self._listed})

    def get(self, name: str | None) -> AgentLoop:
        """Return the loop of a row's agent_name; None means the default."""
        wanted = name or self.default
        if wanted not in self._built:
            self._built[wanted] = self._build(wanted)
        return self._built[wanted]

    def batched(self, name: str | None) -> bool:
        """Return whether rows of this loop are one answer, so that the engine can get all of them at once."""
        return bool(getattr(self.get(name), "batched", False))

    def lists_tools(self, name: str | None) -> bool:
        """Return whether the chat template shows the tools in prompts of this loop."""
        return bool(getattr(self.get(name), "lists_tools", False))

    async def close(self) -> None:
        """Close the loops that can be closed."""
        for loop in self._built.values():
            close = getattr(loop, "close", None)
            if close is not None:
                await close()

    def _build(self, name: str) -> AgentLoop:
        factory, arguments = self._factory(name)
        if inspect.iscoroutinefunction(factory):
            return FunctionLoop(factory, **arguments)
        try:
            loop: AgentLoop = factory(**arguments)
        except TypeError as error:
            raise ValueError(
                f"The agent loop {name!r} cannot be made with {dict(arguments)}: {error}."
            ) from error
        if not inspect.iscoroutinefunction(getattr(loop, "run", None)):
            raise ValueError(f"The agent loop {name!r} needs a method `async def run(self, episode)`.")
        return loop

    def _factory(self, name: str) -> tuple[LoopFactory, Mapping[str, object]]:
        if name in self._listed:
            return self._listed[name]
        if name in AGENT_LOOPS:
            return AGENT_LOOPS.get(name), {}
        known = self.names()
        raise ValueError(
            f"Unknown agent loop {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}. Your own "
            f"goes in the list that {KEY} names, or in a file listed under `plugins`."
        )
