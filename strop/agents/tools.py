"""The protocol of tools, the result of a call, and a typed Python function as a tool."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from strop.agents.call_threads import AbandonableThreads
from strop.agents.tool_schema import JsonObject, ToolSchema, schema_of

__all__ = [
    "NotText",
    "StatelessTool",
    "Tool",
    "ToolResult",
    "ToolSchema",
    "result_of",
    "schema_of",
    "stateless",
    "tool_from_function",
]


class NotText(ValueError):
    """A tool returned something other than text."""


@dataclass(frozen=True)
class ToolResult:
    """The result of one call."""

    text: str
    """What the model reads."""
    reward: float = 0.0
    """For this call."""
    metrics: dict[str, float] = field(default_factory=dict)
    images: tuple[object, ...] = ()
    """What the model sees before the text: paths, bytes, data URLs or PIL images."""
    failed: bool = False
    """The call could not be made or gave nothing usable; `text` says why to the model."""


class Tool(Protocol):
    """One object serves all episodes of a run at once; `instance_id` tells the episodes apart."""

    schema: ToolSchema

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        """Begin an episode, before its first call; the instance id that the other methods get."""
        ...

    async def execute(self, instance_id: str, arguments: JsonObject) -> ToolResult:
        """Make one call."""
        ...

    async def calc_reward(self, instance_id: str) -> float:
        """Return the reward for the whole episode, at its end."""
        ...

    async def release(self, instance_id: str) -> None:
        """End the episode, however it ended."""
        ...


def runs_in_threads(tool: Tool) -> bool:
    """Return whether `execute` only waits for a thread of its own, so that any event loop can await it."""
    return isinstance(tool, FunctionTool) and not tool.is_async


class StatelessTool:
    """A tool whose calls are independent of each other: a subclass only writes `execute`."""

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        return instance_id

    async def calc_reward(self, instance_id: str) -> float:
        return 0.0

    async def release(self, instance_id: str) -> None:
        """Nothing is held."""


def stateless(tool: Tool) -> bool:
    """Return whether a tool keeps no state per episode, so that only `execute` needs to be called."""
    for name in ("create", "calc_reward", "release"):
        if getattr(type(tool), name, None) is not getattr(StatelessTool, name):
            return False
    return True


def tool_from_function(function: Callable[..., object], schema: ToolSchema | None = None) -> Tool:
    """Return a tool with the name, the docstring and the typed parameters of `function`, which may be async.

    The function returns text, or anything that JSON can hold, or a ToolResult. A plain function runs in a
    thread.
    """
    if not callable(function):
        raise ValueError(f"A tool function is needed, not {function!r}.")
    return FunctionTool(function, schema or schema_of(function))


class FunctionTool(StatelessTool):
    """A Python function as a tool."""

    def __init__(self, function: Callable[..., Any], schema: ToolSchema) -> None:
        self.function = function
        self.schema = schema
        self.is_async = inspect.iscoroutinefunction(function)
        self._threads = AbandonableThreads(f"strop-tool-{schema.name}")

    async def execute(self, instance_id: str, arguments: JsonObject) -> ToolResult:
        if self.is_async:
            return result_of(await self.function(**arguments))
        return result_of(await self._threads.call(self.function, arguments))


def result_of(value: object) -> ToolResult:
    """Return what a function returned as text for the model; NotText if it has no form in text."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    try:
        return ToolResult(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise NotText(f"it returned {type(value).__name__}, which cannot be shown as text") from error
