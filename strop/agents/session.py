"""The tools of one episode: every call gets a result, whatever the model wrote and whatever the tool does.

Tools live on an event loop of their own, so one that blocks its loop cannot hold up the engine, and time limits are kept from
outside that loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.agents.arguments import fitted
from strop.agents.calls import Malformed, ToolCall
from strop.agents.tools import NotText, Tool, ToolResult, stateless
from strop.registry import did_you_mean
from strop.rewards.calls import BackgroundLoop, contained

logger = logging.getLogger(__name__)
SHOWN = 200  # characters of a malformed call that are repeated to the model


@dataclass(frozen=True)
class CallLimits:
    timeout: float
    """Seconds for one call."""
    max_response_length: int
    """Characters of a result."""
    truncate_side: str
    """left keeps the head, right keeps the tail, middle keeps both."""
    max_parallel: int
    """Calls of one turn; further ones are refused."""


class Session:
    def __init__(
        self,
        tools: Mapping[str, Tool],
        create_kwargs: Mapping[str, Mapping[str, Any]],
        limits: CallLimits,
        loop: BackgroundLoop,
    ):
        self.tools, self.create_kwargs, self.limits = tools, create_kwargs, limits
        self.counts: Counter[str] = Counter()
        """tool_calls, tool_failures, tool_failures/<kind>, tool_truncated; tool_errors/<method> for what is not a call."""
        self._loop = loop
        self._instances: dict[str, asyncio.Task[str]] = {}
        self._plain: dict[str, str] = {}
        """Instances of stateless tools that were used."""

    async def run(self, calls: Sequence[ToolCall | Malformed]) -> list[ToolResult]:
        """A result for every call, in order. Calls run side by side; a bad one gets a message for the model."""
        return list(await asyncio.gather(*(self._answer(call, place) for place, call in enumerate(calls))))

    async def rewards(self) -> dict[str, float]:
        """calc_reward of each tool that was used; one that fails is left out, and counted."""
        found: dict[str, float] = dict.fromkeys(self._plain, 0.0)
        for name, instance in self._created():
            try:
                found[name] = _finite(await self._limited(self.tools[name].calc_reward(instance)))
            except Exception as error:  # noqa: BLE001 - the border of one tool
                self._note("calc_reward", name, error)
        return found

    async def close(self) -> None:
        """Release every tool that was used."""
        if any(not task.done() for task in self._instances.values()):
            self._loop.start(_cancel(list(self._instances.values())))
        for name, instance in self._created():
            try:
                await self._limited(self.tools[name].release(instance))
            except Exception as error:  # noqa: BLE001 - the border of one tool
                self._note("release", name, error)
        self._instances.clear()
        self._plain.clear()

    async def _answer(self, call: ToolCall | Malformed, place: int) -> ToolResult:
        self.counts["tool_calls"] += 1
        if isinstance(call, Malformed):
            return self._fail("malformed", f"The tool call could not be read: {call.why}. You wrote: {call.text[:SHOWN]}")
        if place >= self.limits.max_parallel:
            most = self.limits.max_parallel
            return self._fail(
                "too_many", f"Not run: at most {most} tool {'call is' if most == 1 else 'calls are'} made per turn."
            )
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return self._fail(
                "unknown_tool", f"There is no tool {call.name[:SHOWN]!r}.{did_you_mean(call.name, self.tools)} Tools: {known}."
            )
        try:
            arguments = fitted(call.arguments, tool.schema.parameters)
        except ValueError as error:
            return self._fail("wrong_arguments", f"Wrong arguments for {call.name}: {error}.")
        return await self._execute(call.name, tool, arguments)

    async def _execute(self, name: str, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        try:
            result = await self._limited(self._call(name, tool, arguments))
            _check(result)
        except TimeoutError as error:
            return self._fail("timed_out", f"{name} failed: {error or 'it timed out'}")
        except NotText as error:
            return self._fail("not_text", f"{name} failed: {error}.")
        except Exception as error:  # noqa: BLE001 - the border of one call: tools are the user's, and may raise anything
            return self._fail("raised", f"{name} failed: {type(error).__name__}: {error}")
        text = self._short(result.text)
        if result.failed:
            return replace(self._fail("by_tool", text), reward=result.reward, metrics=result.metrics)
        return replace(result, text=text)

    async def _call(self, name: str, tool: Tool, arguments: dict[str, Any]) -> Any:
        """On the loop of the tools; the first call of a tool begins its part of the episode."""
        if stateless(tool):
            return await tool.execute(self._plain.setdefault(name, uuid.uuid4().hex), arguments)
        if name not in self._instances:
            kwargs = self.create_kwargs.get(name) or {}
            self._instances[name] = asyncio.ensure_future(contained(tool.create(uuid.uuid4().hex, **kwargs)))
        instance = await asyncio.shield(self._instances[name])
        return await tool.execute(instance, arguments)

    def _created(self) -> list[tuple[str, str]]:
        """Name and instance of every tool whose create succeeded."""
        return [
            (name, task.result())
            for name, task in self._instances.items()
            if task.done() and not task.cancelled() and task.exception() is None
        ]

    async def _limited(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run on the tools' loop; TimeoutError when it is late, at once, even if it cannot be cancelled."""
        future = asyncio.wrap_future(self._loop.start(work))
        try:
            done, _ = await asyncio.wait({future}, timeout=self.limits.timeout)
        except asyncio.CancelledError:
            future.cancel()
            raise
        if not done:
            future.cancel()
            raise TimeoutError(f"no answer within {self.limits.timeout:g} seconds")
        if future.cancelled():
            raise RuntimeError("the call was cancelled")
        return future.result()

    def _fail(self, kind: str, text: str) -> ToolResult:
        self.counts["tool_failures"] += 1
        self.counts[f"tool_failures/{kind}"] += 1
        logger.debug("tool call failed (%s): %s", kind, text)
        return ToolResult(self._short(text), failed=True)

    def _note(self, method: str, name: str, error: Exception) -> None:
        self.counts[f"tool_errors/{method}"] += 1
        logger.debug("%s of tool %s failed: %s: %s", method, name, type(error).__name__, error)

    def _short(self, text: str) -> str:
        # Lone surrogates cannot be encoded, so no tokenizer would take them.
        text = text.encode("utf-8", "replace").decode("utf-8")
        short = truncated(text, self.limits.max_response_length, self.limits.truncate_side)
        if short != text:
            self.counts["tool_truncated"] += 1
        return short


async def _cancel(tasks: Sequence[asyncio.Task[str]]) -> None:
    for task in tasks:
        task.cancel()


def truncated(text: str, most: int, side: str) -> str:
    """At most `most` characters of `text`, and a note in place of what was cut. left keeps the head, right keeps the tail.

    >>> truncated("abcdefgh", 4, "middle")
    'ab...(4 characters cut)...gh'
    """
    if len(text) <= most:
        return text
    note = f"...({len(text) - most} characters cut)..."
    head = {"left": most, "middle": (most + 1) // 2, "right": 0}[side]
    tail = most - head
    return text[:head] + note + (text[-tail:] if tail else "")


def _check(result: Any) -> None:
    if not isinstance(result, ToolResult):
        raise NotText(f"it returned {type(result).__name__} where a ToolResult is needed")
    if not isinstance(result.text, str):
        raise NotText(f"its result has {type(result.text).__name__} as text")
    _finite(result.reward)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward of {number} is not a finite number")
    return number
