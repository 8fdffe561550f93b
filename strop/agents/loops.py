"""Who answers a row: agent loops by name.

A loop is a class with `async def run(self, episode)`, or just such a function. Built-in ones are in the catalog; your own are
registered by a plugin (`@AGENT_LOOPS.register("mine")`), or listed in the YAML of rollout.agent.agent_loop_config_path:

    - name: math_expression
      _target_: math_expression.py:MathExpression     # beside the YAML or the working directory; or package.module.Name
      step_reward: 0.1                                # further keys are its arguments
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from strop.agents.episode import Episode
from strop.agents.interaction import read_yaml
from strop.agents.toolbox import load_target
from strop.catalog import AGENT_LOOPS
from strop.registry import did_you_mean

KEY = "rollout.agent.agent_loop_config_path"


class AgentLoop(Protocol):
    """What a loop may say of itself: `lists_tools` (the chat template shows the tools), `batched` (one answer is all)."""

    async def run(self, episode: Episode) -> None:
        """Hold one conversation."""
        ...


class FunctionLoop:
    """A plain coroutine function as a loop."""

    def __init__(self, function: Callable[[Episode], Any], **arguments: Any) -> None:
        self._function = functools.partial(function, **arguments)
        self.lists_tools = bool(getattr(function, "lists_tools", False))

    async def run(self, episode: Episode) -> None:
        await self._function(episode)


class Loops:
    """The loops of a run, made when a row first asks for them."""

    def __init__(self, default: str = "single_turn_agent", listed: Mapping[str, tuple[Any, Mapping[str, Any]]] | None = None):
        """`listed`: name -> (class or function, its arguments)."""
        self.default = default
        self._listed = dict(listed or {})
        self._made: dict[str, AgentLoop] = {}

    @classmethod
    def from_config(cls, default: str, path: str | None) -> Loops:
        listed: dict[str, tuple[Any, Mapping[str, Any]]] = {}
        entries = [] if path is None else read_yaml(path, KEY)
        if not isinstance(entries, list):
            raise ValueError(f"{KEY}={path} must hold a list of {{name, _target_, ...}}.")
        for number, entry in enumerate(entries, 1):
            where = f"{path}, loop {number}"
            if not isinstance(entry, dict) or not {"name", "_target_"} <= set(entry):
                raise ValueError(f"{where} is {entry!r}; it needs `name` and `_target_`.")
            arguments = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
            name = str(entry["name"])
            if name in listed or name in AGENT_LOOPS:
                raise ValueError(f"{where}: the name {name!r} is taken already. Choose another.")
            listed[name] = (load_target(str(entry["_target_"]), Path(str(path)).parent, where), arguments)
        return cls(default, listed)

    def names(self) -> list[str]:
        return sorted({*AGENT_LOOPS.names(), *self._listed})

    def get(self, name: str | None) -> AgentLoop:
        """The loop of a row's agent_name; None asks for the default."""
        wanted = name or self.default
        if wanted not in self._made:
            self._made[wanted] = self._make(wanted)
        return self._made[wanted]

    def batched(self, name: str | None) -> bool:
        """Whether rows of this agent are one answer, so that the engine may be given all of them at once."""
        return bool(getattr(self.get(name), "batched", False))

    def lists_tools(self, name: str | None) -> bool:
        """Whether the chat template shows the tools in prompts of this agent."""
        return bool(getattr(self.get(name), "lists_tools", False))

    def _make(self, name: str) -> AgentLoop:
        if name in self._listed:
            kind, arguments = self._listed[name]
        elif name in AGENT_LOOPS:
            kind, arguments = AGENT_LOOPS.get(name), {}
        else:
            known = self.names()
            raise ValueError(
                f"Unknown agent loop {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}. Your own goes in the list "
                f"that {KEY} names, or in a file listed under `plugins`."
            )
        if inspect.iscoroutinefunction(kind):
            return FunctionLoop(kind, **arguments)
        try:
            loop: AgentLoop = kind(**arguments)
        except TypeError as error:
            raise ValueError(f"The agent loop {name!r} cannot be made with {dict(arguments)}: {error}.") from error
        if not inspect.iscoroutinefunction(getattr(loop, "run", None)):
            raise ValueError(f"The agent loop {name!r} needs a method `async def run(self, episode)`.")
        return loop
