"""What a tool is, what a call of it gives, and a typed Python function as a tool."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from strop.agents.signature import schema_of
from strop.agents.tool_schema import ToolSchema

__all__ = ["NotText", "StatelessTool", "Tool", "ToolResult", "ToolSchema", "result_of", "stateless", "tool_from_function"]

MOST_ABANDONED = 64  # threads of one tool that never came back, before it is taken to be broken
REST_SECONDS = 30.0
"""After so long without a call a thread ends."""


class NotText(ValueError):
    """A tool returned something other than text."""


@dataclass(frozen=True)
class ToolResult:
    text: str
    """What the model is told."""
    reward: float = 0.0
    """For this call."""
    metrics: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    """The call could not be made or gave nothing usable; `text` tells the model why."""


class Tool(Protocol):
    """An instance serves all episodes of a run at once; `instance_id` tells them apart."""

    schema: ToolSchema

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        """Begin an episode, before its first call; returns the instance id, which the other methods are given."""
        ...

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResult: ...

    async def calc_reward(self, instance_id: str) -> float:
        """The reward for the whole episode, asked for at its end."""
        ...

    async def release(self, instance_id: str) -> None:
        """The episode is over, however it ended."""
        ...


class StatelessTool:
    """A tool whose calls have nothing to do with each other: only `execute` is left to write."""

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        return instance_id

    async def calc_reward(self, instance_id: str) -> float:
        return 0.0

    async def release(self, instance_id: str) -> None:
        """Nothing is held."""


def stateless(tool: Tool) -> bool:
    """Whether an episode neither begins nor ends for this tool, so that it need not be asked."""
    return all(getattr(type(tool), name, None) is getattr(StatelessTool, name) for name in ("create", "calc_reward", "release"))


def tool_from_function(function: Callable[..., Any], schema: ToolSchema | None = None) -> Tool:
    """A tool with the name, the docstring and the typed parameters of `function`, which may be async.

    It returns text, or anything that JSON can hold, or a ToolResult. A plain function runs in a thread of its own.
    """
    if not callable(function):
        raise ValueError(f"A tool function is needed, not {function!r}.")
    return FunctionTool(function, schema or schema_of(function))


class FunctionTool(StatelessTool):
    def __init__(self, function: Callable[..., Any], schema: ToolSchema):
        self.function, self.schema = function, schema
        self.is_async = inspect.iscoroutinefunction(function)
        self._threads = AbandonableThreads(f"strop-tool-{schema.name}")

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResult:
        if self.is_async:
            return result_of(await self.function(**arguments))
        return result_of(await self._threads.call(self.function, arguments))


class AbandonableThreads:
    """Calls in daemon threads: one that hangs neither holds up the event loop nor keeps the program from ending.

    A thread that is done waits for the next call. It cannot be stopped: those that were given up and still run are counted, and
    too many of them are an error.
    """

    def __init__(self, name: str):
        self.name, self.abandoned = name, 0
        self._lock = threading.Lock()
        self._resting: list[SimpleQueue[Callable[[], None]]] = []
        """Where each thread that has nothing to do looks for its next call; the one that came last is taken first."""

    async def call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if self.abandoned >= MOST_ABANDONED:
            raise RuntimeError(f"{self.abandoned} earlier calls never returned, so no further one is made")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        given_up = returned = False

        def work() -> None:
            nonlocal returned
            try:
                value, error = function(**arguments), None
            except BaseException as caught:  # noqa: BLE001 - the border of one call: the caller gets whatever it raised
                value, error = None, caught
            with self._lock:
                returned = True
                if given_up:
                    self.abandoned -= 1
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, answer, value, error)

        self._hand_to_a_thread(work)
        try:
            return await answer
        except asyncio.CancelledError:
            with self._lock:
                if not returned:
                    given_up = True
                    self.abandoned += 1
            raise

    def _hand_to_a_thread(self, work: Callable[[], None]) -> None:
        with self._lock:
            inbox = self._resting.pop() if self._resting else None
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=self.name, daemon=True).start()
        inbox.put(work)

    def _serve(self, inbox: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                inbox.get(timeout=REST_SECONDS)()
            except Empty:
                with self._lock:
                    if inbox in self._resting:
                        self._resting.remove(inbox)
                        return
                continue  # a call is on its way
            with self._lock:
                self._resting.append(inbox)


def _settle(answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        answer.set_exception(error)
    else:  # SystemExit and its like must end the call, not the program
        answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def result_of(value: Any) -> ToolResult:
    """What a function returned, as text for the model; NotText if it cannot be told in text."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    try:
        return ToolResult(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise NotText(f"it returned {type(value).__name__}, which cannot be told in text") from error
