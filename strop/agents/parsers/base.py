"""What all formats of tool calls share: the protocol, thoughts, and reading JSON that a model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from strop.agents.calls import Malformed, Parsed, ToolCall

Found = tuple[str, list[ToolCall | Malformed]]
END_OF_THOUGHT = "</think>"
# A control token that ends a turn. Engines hand over the whole completion, so it may still stand at the end of the text.
_END_OF_TURN = re.compile(r"(?:<\|[\w-]{1,40}\|>|<｜end▁of▁sentence｜>|</s>)$")


class ToolParser(Protocol):
    def parse(self, text: str) -> Parsed:
        """The calls in what a model said (special tokens included). Never raises, whatever the text."""
        ...


def parse_after_thought(text: str, calls_in: Callable[[str], Found]) -> Parsed:
    """What `calls_in` finds in the text after the model's thoughts: a call that it only thinks of is not made."""
    head, end, rest = text.rpartition(END_OF_THOUGHT)
    if "<think>" in rest:  # a thought that was cut off
        return Parsed(text)
    content, calls = calls_in(rest)
    return Parsed((head + end + content).strip(), tuple(calls))


def without_end_of_turn(text: str) -> str:
    """The text without the control tokens it ends with."""
    text = text.rstrip()
    while end := _END_OF_TURN.search(text, max(0, len(text) - 50)):
        text = text[: end.start()].rstrip()
    return text


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `start` (spaces are skipped) and where it ends; ValueError says what is wrong."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error.msg} at character {error.pos - start}") from error
    except RecursionError as error:
        raise ValueError("invalid JSON: nested too deeply") from error


def call_in(value: Any, text: str) -> ToolCall | Malformed:
    """A call from its JSON form: {"name", "arguments" or "parameters", "id"?}, perhaps inside {"function": ...}."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"id": value.get("id", ""), **value["function"]}
    if not isinstance(value, dict):
        return Malformed(text, f"a call must be a JSON object with 'name' and 'arguments', not {kind_of(value)}")
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


def kind_of(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"invalid JSON: {name} is not a number")


# strict=False: models write line breaks inside strings, and what they mean is clear.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
