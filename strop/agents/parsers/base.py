"""Tool calls, and what all formats of them share: the protocol, thoughts, reading JSON that a model wrote.

Each format is a file of this folder. `parser_for` finds one by its name in `multi_turn.format`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, Protocol

from strop.agents.tool_schema import JsonObject
from strop.catalog import TOOL_PARSERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Raw(str):
    """An argument in a format that does not tell numbers from text. The tool's schema decides its type."""

    __slots__ = ()


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: JsonObject = field(default_factory=dict)
    id: str = ""
    """Empty in formats without ids."""


@dataclass(frozen=True)
class Malformed:
    """A call that cannot be read."""

    text: str
    """What the model wrote."""
    why: str
    """What is wrong with it, in words for the model."""
    name: str = ""
    """The tool that it calls, where the format tells."""


@dataclass(frozen=True)
class Parsed:
    """An answer, divided into text and calls."""

    content: str
    """The text outside the calls."""
    calls: tuple[ToolCall | Malformed, ...] = ()
    """In the order in which they were written."""


Found = tuple[str, list[ToolCall | Malformed]]
"""The text outside the calls, and the calls."""
THOUGHT = "<think>"
END_OF_THOUGHT = "</think>"
OPENING = 16
"""Tokens before an answer that show whether they open a thought."""
# A control token that ends a turn. Engines return the whole completion, so the text may still end with it.
_END_OF_TURN = re.compile(r"(?:<\|[\w-]{1,40}\|>|<｜end▁of▁sentence｜>|</s>)$")


class ToolParser(Protocol):
    """Reads the calls of one format."""

    def parse(self, text: str) -> Parsed:
        """Return the calls in an answer (with special tokens). Never raises, whatever the text."""
        ...


def parse_answer(parser: ToolParser, text: str, before: str) -> Parsed:
    """Return the calls of an answer; `before` is what stands before it, which may open a thought."""
    if before.rstrip().endswith(THOUGHT) and END_OF_THOUGHT not in text:
        return Parsed(text.strip())
    return parser.parse(text)


def parse_after_thought(text: str, calls_in: Callable[[str], Found]) -> Parsed:
    """Apply `calls_in` to the text after the model's thoughts: a call inside a thought is not made."""
    head, end, rest = text.rpartition(END_OF_THOUGHT)
    if THOUGHT in rest:  # a thought that was cut off
        return Parsed(text)
    content, calls = calls_in(rest)
    return Parsed((head + end + content).strip(), tuple(calls))


def without_end_of_turn(text: str) -> str:
    """Return the text without the control tokens at its end."""
    text = text.rstrip()
    while end := _END_OF_TURN.search(text, max(0, len(text) - 50)):
        text = text[: end.start()].rstrip()
    return text


def read_json(text: str, start: int = 0) -> tuple[object, int]:
    """Return the JSON value that begins at `start` (after spaces) and where it ends; ValueError says what is
    wrong."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error.msg} at character {error.pos - start}") from error
    except RecursionError as error:
        raise ValueError("invalid JSON: nested too deeply") from error


def call_in(value: object, text: str) -> ToolCall | Malformed:
    """Return the call of a JSON value: {"name", "arguments" or "parameters", "id"?}, or that inside
    {"function": ...}."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"id": value.get("id", ""), **value["function"]}
    if not isinstance(value, dict):
        return Malformed(
            text, f"a call must be a JSON object with 'name' and 'arguments', not {kind_of(value)}"
        )
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return Malformed(text, "the call has no 'name' of a tool")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments, _ = read_json(arguments)
        except ValueError as error:
            return Malformed(text, f"'arguments' is a string with {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return Malformed(text, f"'arguments' must be a JSON object, not {kind_of(arguments)}")
    return ToolCall(name, arguments, str(value.get("id") or ""))


def kind_of(value: object) -> str:
    """Return the JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"invalid JSON: {name} is not a number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"invalid JSON: {digits} is too large")
    return value


# strict=False: models write line breaks inside strings, and the meaning is clear.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=_finite)


def parser_for(name: str, tokenizer: PreTrainedTokenizerBase | None) -> ToolParser:
    """Return the parser called `name`; "template" (or "auto") uses what the tokenizer's chat template
    writes."""
    entry = TOOL_PARSERS.entry(name)
    factory = entry.load()
    parser: ToolParser
    if entry.facts["reads_template"]:
        parser = factory(tokenizer)
    else:
        parser = factory()
    return parser
