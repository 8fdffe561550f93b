"""The protocol of tools, the result of a call, and a typed Python function as a tool."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

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

T = TypeVar("T")
MAX_ABANDONED = 64
"""Threads of one tool that never returned, before the tool counts as broken."""
IDLE_SECONDS = 30.0
"""A thread without a call ends after this time."""


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


class AbandonableThreads:
    """Calls in daemon threads: a call that hangs blocks neither the event loop nor the end of the program.

    A thread that has finished waits for the next call. A thread cannot be stopped: those that were abandoned
    and still run are counted, and too many of them are an error.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.abandoned = 0
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Callable[[], None]]] = []
        """The queue of each idle thread; the thread that became idle last is used first."""

    async def call(self, function: Callable[..., T], arguments: JsonObject) -> T:
        """Await `function(**arguments)` in a thread."""
        if self.abandoned >= MAX_ABANDONED:
            raise RuntimeError(f"{self.abandoned} earlier calls never returned, so no further one is made")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        given_up = False
        returned = False

        def work() -> None:
            nonlocal returned
            settle: Callable[[], None]
            try:
                settle = partial(_set_result, answer, function(**arguments))
            except BaseException as error:  # noqa: BLE001 - the caller gets whatever the call raised
                settle = partial(_set_error, answer, error)
            with self._lock:
                returned = True
                if given_up:
                    self.abandoned -= 1
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle)

        self._run_in_thread(work)
        try:
            return await answer
        except asyncio.CancelledError:
            with self._lock:
                if not returned:
                    given_up = True
                    self.abandoned += 1
            raise

    def _run_in_thread(self, work: Callable[[], None]) -> None:
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=self.name, daemon=True).start()
        inbox.put(work)

    def _serve(self, inbox: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                inbox.get(timeout=IDLE_SECONDS)()
            except Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue  # the queue was taken, so a call is on its way
            with self._lock:
                self._idle.append(inbox)


def _set_result(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _set_error(answer: asyncio.Future[T], error: BaseException) -> None:
    if answer.done():
        return
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        answer.set_exception(error)
    else:  # SystemExit and the like must end the call, not the program
        answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


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
