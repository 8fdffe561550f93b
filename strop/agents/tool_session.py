"""The tools of one episode: every call gets a result, whatever the model wrote and whatever the tool does.

Tools run on their own event loop, or in threads, so a tool that blocks cannot block the engine, and timeouts
are enforced from outside. Arguments are checked against the part of JSON schema that tools use; error
messages are written for the model, which reads them and may call again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import uuid
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from strop.agents.parsers.base import Malformed, Raw, ToolCall, kind_of
from strop.agents.tool_schema import JsonObject, JsonSchema
from strop.agents.tools import NotText, Tool, ToolResult, runs_in_threads, stateless
from strop.concurrency import BackgroundLoop, contained
from strop.registry import did_you_mean

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_SHOWN = 200
"""Characters of a malformed call that are repeated to the model."""
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
MAX_SHOWN_VALUE = 60
"""Characters of a wrong value that an error shows."""


@dataclass(frozen=True)
class CallLimits:
    """Limits of tool calls, from the section `multi_turn`."""

    timeout: float
    """Seconds for one call."""
    max_response_length: int
    """Characters of a result."""
    truncate_side: str
    """left keeps the head, right keeps the tail, middle keeps both."""
    max_parallel: int
    """Calls of one turn; further ones are refused."""


class ToolSession:
    """Runs the tool calls of one episode and releases the tools at its end."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        create_kwargs: Mapping[str, JsonObject],
        limits: CallLimits,
        loop: BackgroundLoop,
    ) -> None:
        """`create_kwargs`: what the row gives to `Tool.create`, by tool."""
        self.tools = tools
        self.create_kwargs = create_kwargs
        self.limits = limits
        self.counts: Counter[str] = Counter()
        """tool_calls, tool_failures, tool_failures/<kind>, tool_truncated; tool_errors/<method> for what is
        not a call."""
        self._loop = loop
        self._instances: dict[str, asyncio.Task[str]] = {}
        """The running or finished `create` of each tool with state that was used."""
        self._stateless_ids: dict[str, str] = {}
        """Instance ids of stateless tools that were used."""

    async def run(self, calls: Sequence[ToolCall | Malformed]) -> list[ToolResult]:
        """Return a result for every call, in order. Calls run concurrently; a bad call gets a message for the
        model."""
        return list(await asyncio.gather(*(self._answer(call, place) for place, call in enumerate(calls))))

    async def rewards(self) -> dict[str, float]:
        """Return calc_reward of each tool that was used; one that fails is left out, and counted."""
        rewards: dict[str, float] = dict.fromkeys(self._stateless_ids, 0.0)
        for name, instance in self._created():
            try:
                rewards[name] = _finite(await self._with_timeout(self.tools[name].calc_reward(instance)))
            except Exception as error:  # noqa: BLE001 - tools are user code, and may raise anything
                self._count_error("calc_reward", name, error)
        return rewards

    async def close(self) -> None:
        """Release every tool that was used."""
        if any(not task.done() for task in self._instances.values()):
            self._loop.start(_cancel(list(self._instances.values())))
        for name, instance in self._created():
            try:
                await self._with_timeout(self.tools[name].release(instance))
            except Exception as error:  # noqa: BLE001 - tools are user code, and may raise anything
                self._count_error("release", name, error)
        self._instances.clear()
        self._stateless_ids.clear()

    # --- one call -------------------------------------------------------------------------------------------

    async def _answer(self, call: ToolCall | Malformed, place: int) -> ToolResult:
        """Check a call and make it. `place`: its number in the turn."""
        self.counts["tool_calls"] += 1
        if isinstance(call, Malformed):
            return self._fail(
                "malformed",
                f"The tool call could not be read: {call.why}. You wrote: {call.text[:MAX_SHOWN]}",
            )
        limit = self.limits.max_parallel
        if place >= limit:
            calls = "call is" if limit == 1 else "calls are"
            return self._fail("too_many", f"Not run: at most {limit} tool {calls} made per turn.")
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return self._fail(
                "unknown_tool",
                f"There is no tool {call.name[:MAX_SHOWN]!r}.{did_you_mean(call.name, self.tools)} Tools: "
                f"{known}.",
            )
        try:
            arguments = fit_arguments(call.arguments, tool.schema.parameters)
        except ValueError as error:
            return self._fail("wrong_arguments", f"Wrong arguments for {call.name}: {error}.")
        return await self._execute(call.name, tool, arguments)

    async def _execute(self, name: str, tool: Tool, arguments: JsonObject) -> ToolResult:
        try:
            result = await self._with_timeout(self._call(name, tool, arguments), here=runs_in_threads(tool))
            _check_result(result)
        except TimeoutError as error:
            return self._fail("timed_out", f"{name} failed: {error or 'it timed out'}")
        except NotText as error:
            return self._fail("not_text", f"{name} failed: {error}.")
        except Exception as error:  # noqa: BLE001 - tools are user code, and may raise anything
            return self._fail("raised", f"{name} failed: {type(error).__name__}: {error}")
        text = self._shortened(result.text)
        if result.failed:
            return replace(self._fail("by_tool", text), reward=result.reward, metrics=result.metrics)
        return replace(result, text=text)

    async def _call(self, name: str, tool: Tool, arguments: JsonObject) -> ToolResult:
        """The first call of a tool with state begins its part of the episode, on the loop of the tools."""
        if stateless(tool):
            instance = self._stateless_ids.setdefault(name, uuid.uuid4().hex)
            return await tool.execute(instance, arguments)
        if name not in self._instances:
            kwargs = self.create_kwargs.get(name) or {}
            self._instances[name] = asyncio.ensure_future(contained(tool.create(uuid.uuid4().hex, **kwargs)))
        instance = await asyncio.shield(self._instances[name])
        return await tool.execute(instance, arguments)

    def _created(self) -> list[tuple[str, str]]:
        """Return name and instance of every tool whose `create` succeeded."""
        created = []
        for name, task in self._instances.items():
            if task.done() and not task.cancelled() and task.exception() is None:
                created.append((name, task.result()))
        return created

    async def _with_timeout(self, work: Coroutine[object, None, T], *, here: bool = False) -> T:
        """Run on the tools' loop, or `here`. After the timeout it raises at once, even if the work cannot be
        cancelled."""
        future: asyncio.Future[T]
        if here:
            future = asyncio.ensure_future(contained(work))
        else:
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
        return ToolResult(self._shortened(text), failed=True)

    def _count_error(self, method: str, name: str, error: Exception) -> None:
        self.counts[f"tool_errors/{method}"] += 1
        logger.debug("%s of tool %s failed: %s: %s", method, name, type(error).__name__, error)

    def _shortened(self, text: str) -> str:
        # Lone surrogates cannot be encoded, so no tokenizer would take them.
        text = text.encode("utf-8", "replace").decode("utf-8")
        short = truncated(text, self.limits.max_response_length, self.limits.truncate_side)
        if short != text:
            self.counts["tool_truncated"] += 1
        return short


async def _cancel(tasks: Sequence[asyncio.Task[str]]) -> None:
    for task in tasks:
        task.cancel()


def truncated(text: str, limit: int, side: str) -> str:
    """Return at most `limit` characters of `text`, and a note in place of what was cut. left keeps the head,
    right keeps the tail.

    >>> truncated("abcdefgh", 4, "middle")
    'ab...(4 characters cut)...gh'
    """
    if len(text) <= limit:
        return text
    note = f"...({len(text) - limit} characters cut)..."
    head = {"left": limit, "middle": (limit + 1) // 2, "right": 0}[side]
    tail = limit - head
    return text[:head] + note + text[len(text) - tail :]


def _check_result(result: object) -> None:
    """Raise when user code returned something else than a ToolResult with text and a finite reward."""
    if not isinstance(result, ToolResult):
        raise NotText(f"it returned {type(result).__name__} where a ToolResult is needed")
    text: object = result.text
    if not isinstance(text, str):
        raise NotText(f"its result has {type(text).__name__} as text")
    _finite(result.reward)


def _finite(value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward of {number} is not a finite number")
    return number


def fit_arguments(arguments: Mapping[str, object], schema: JsonSchema) -> JsonObject:
    """Return the arguments with raw text converted to its type and 3.0 to 3; ValueError lists everything that
    does not fit."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    problems = [f"argument {name!r} is missing" for name in required if name not in arguments]
    result: JsonObject = {}
    open_ended = schema.get("additionalProperties", not properties) is not False  # {} allows anything
    for name, value in arguments.items():
        if name in properties:
            try:
                result[name] = _fit(value, properties[name], f"argument {name!r}")
            except ValueError as error:
                problems.append(str(error))
        elif open_ended:
            result[name] = str(value) if isinstance(value, Raw) else value
        else:
            takes = f"it takes {', '.join(properties)}" if properties else "it takes none"
            problems.append(f"there is no argument {name!r}.{did_you_mean(name, properties)} ({takes})")
    if problems:
        raise ValueError("; ".join(problems))
    return result


def typed_arguments(arguments: Mapping[str, object], schema: JsonSchema) -> JsonObject:
    """Return the arguments with raw text converted to the types of the schema; nothing is checked."""
    properties = schema.get("properties")
    typed: JsonObject = {}
    for name, value in arguments.items():
        form = properties.get(name) if isinstance(properties, Mapping) else None
        if isinstance(value, Raw):
            value = _convert(value, form if isinstance(form, Mapping) else {})
        typed[name] = value
    return typed


def _fit(value: object, schema: object, where: str) -> object:
    """Return the value, converted where needed; ValueError when it does not fit. `where` names it."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, Raw):
        value = _convert(value, schema)
    if value is None and schema.get("nullable"):
        return None
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return _fit_one_of(value, choices, where)
    kinds = _kinds(schema)
    if kinds and not any(_has_type(value, kind) for kind in kinds):
        raise ValueError(f"{where} must be {_with_article(kinds)}, not {kind_of(value)} ({_shown(value)})")
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    if schema.get("enum") and value not in schema["enum"]:
        raise ValueError(
            f"{where} must be one of {', '.join(map(repr, schema['enum']))}, not {_shown(value)}"
        )
    if isinstance(value, list) and "items" in schema:
        return [_fit(item, schema["items"], f"item {place} of {where}") for place, item in enumerate(value)]
    if isinstance(value, dict) and schema.get("properties"):
        try:
            return fit_arguments(value, schema)
        except ValueError as error:
            raise ValueError(f"in {where}: {error}") from error
    return value


def _fit_one_of(value: object, choices: Sequence[object], where: str) -> object:
    problems = []
    for schema in choices:
        try:
            return _fit(value, schema, where)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(" or ".join(problems))


def _kinds(schema: JsonSchema) -> list[str]:
    """Return the types that a schema allows; none means any."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return [kinds]
    return list(kinds or [])


def _convert(text: Raw, schema: JsonSchema) -> object:
    """Return what bare text means where the schema wants something else than text."""
    wanted = set(_kinds(schema))
    for form in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        if isinstance(form, Mapping) and isinstance(form.get("type"), str):
            wanted.add(form["type"])
    if not wanted or wanted == {"string"}:
        return str(text)
    try:
        value = json.loads(_PYTHON_WORDS.get(text.strip(), text))
    except (ValueError, RecursionError):
        return str(text)
    fits = any(_has_type(value, kind) for kind in wanted) or (value is None and schema.get("nullable"))
    if fits or "string" not in wanted:
        return value
    return str(text)


def _has_type(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return math.isfinite(value) and value.is_integer()
    return isinstance(value, _PYTHON_TYPES.get(kind, (object,)))


def _with_article(kinds: Sequence[str]) -> str:
    named = []
    for kind in kinds:
        if kind == "null":
            named.append(kind)
        elif kind[0] in "aeio":
            named.append(f"an {kind}")
        else:
            named.append(f"a {kind}")
    return " or ".join(named)


def _shown(value: object) -> str:
    text = repr(value)
    if len(text) <= MAX_SHOWN_VALUE:
        return text
    return text[: MAX_SHOWN_VALUE - 3] + "..."
