"""Llama 3.2 and 4: a Python list of calls, `[weather(city="Rome"), clock()]`. Arguments are literals; nothing
is evaluated."""

from __future__ import annotations

import ast
import re

from strop.agents.parsers.base import (
    Found,
    Malformed,
    Parsed,
    ToolCall,
    parse_after_thought,
    without_end_of_turn,
)
from strop.agents.tool_schema import JsonObject

_START = re.compile(r"(?:<\|python_start\|>\s*)?(?P<list>\[)\s*[A-Za-z_][\w.]*\(")
_AFTER = re.compile(r"\s*<\|python_end\|>")
MAX_LENGTH = 100_000
"""Characters of a list of calls: Python's own parser is recursive."""
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class PythonicParser:
    """The format `pythonic`."""

    def parse(self, text: str) -> Parsed:
        return parse_after_thought(text, _calls_in)


def _calls_in(text: str) -> Found:
    start = _START.search(text)
    if start is None:
        return text, []
    end = _end_of_list(text, start.start("list"))
    if end is None:
        body = without_end_of_turn(text[start.start("list") :])
        return text[: start.start()], [Malformed(body, "the list of calls is not closed by ]")]
    calls = _calls_of(text[start.start("list") : end])
    after = _AFTER.match(text, end)
    if after is not None:
        end = after.end()
    return text[: start.start()] + text[end:], calls


def _end_of_list(text: str, start: int) -> int | None:
    """Return the place after the bracket that closes the one at `start`; brackets in strings do not count."""
    waiting: list[str] = []
    quote = ""
    place = start
    while place < len(text):
        letter = text[place]
        if quote:
            if letter == "\\":
                place += 1
            elif text.startswith(quote, place):
                place += len(quote) - 1
                quote = ""
        elif letter in "\"'":
            quote = letter * 3 if text.startswith(letter * 3, place) else letter
            place += len(quote) - 1
        elif letter in _CLOSERS:
            waiting.append(_CLOSERS[letter])
        elif letter in ")]}":
            if not waiting or waiting.pop() != letter:
                return None
            if not waiting:
                return place + 1
        place += 1
    return None


def _calls_of(body: str) -> list[ToolCall | Malformed]:
    if len(body) > MAX_LENGTH:
        return [Malformed(body, f"the list of calls is longer than {MAX_LENGTH} characters")]
    try:
        tree = ast.parse(body, mode="eval").body
    except SyntaxError as error:
        return [Malformed(body, f"invalid Python: {error.msg}")]
    except (ValueError, MemoryError, RecursionError) as error:
        return [Malformed(body, f"invalid Python: {error or 'nested too deeply'}")]
    if not isinstance(tree, ast.List):
        return [Malformed(body, "calls must stand in a list: [tool(argument=value)]")]
    return [_call(node, ast.get_source_segment(body, node) or body) for node in tree.elts]


def _call(node: ast.expr, text: str) -> ToolCall | Malformed:
    if not isinstance(node, ast.Call):
        return Malformed(text, "the list must hold calls: tool(argument=value)")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return Malformed(text, "every argument needs its name: tool(argument=value)")
    arguments: JsonObject = {}
    for keyword in node.keywords:
        try:
            arguments[str(keyword.arg)] = _json_value(ast.literal_eval(keyword.value))
        except (ValueError, TypeError, MemoryError, RecursionError):
            return Malformed(
                text,
                f"the value of {keyword.arg!r} must be a plain literal: a number, text, list, dict, True, "
                "None",
            )
    return ToolCall(ast.unparse(node.func), arguments)


def _json_value(value: object) -> object:
    """Return a literal as JSON has it; ValueError for sets, bytes and complex numbers."""
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, str | int | float) or value is None:
        return value
    raise ValueError(value)
