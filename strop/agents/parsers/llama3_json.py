"""Llama 3: a turn that is a call, `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or from its first character on.

Several calls are separated by `;` or `,`, or stand in a list.
"""

from __future__ import annotations

from strop.agents.calls import Malformed, Parsed, ToolCall
from strop.agents.parsers.base import Found, call_in, parse_after_thought, read_json, without_end_of_turn

TAG = "<|python_tag|>"


class Llama3JsonParser:
    def parse(self, text: str) -> Parsed:
        return parse_after_thought(text, _calls_in)


def _calls_in(text: str) -> Found:
    said, tag, after = text.partition(TAG)
    if tag:
        return said, json_calls(without_end_of_turn(after))
    body = without_end_of_turn(text).strip()
    if not body.startswith(("{", "[")):
        return text, []
    calls = json_calls(body)
    # An answer may be JSON too; without the tag only what names a tool is taken for a call.
    named = any(isinstance(call, ToolCall) for call in calls) or '"name"' in body
    return ("", calls) if named else (text, [])


def json_calls(body: str) -> list[ToolCall | Malformed]:
    """The calls of a text that holds nothing but calls."""
    calls: list[ToolCall | Malformed] = []
    place = _after_separators(body, 0)
    while place < len(body):
        try:
            value, end = read_json(body, place)
        except ValueError as error:
            return [*calls, Malformed(body[place:].strip(), str(error))]
        calls += [call_in(item, body[place:end]) for item in (value if isinstance(value, list) else [value])]
        place = _after_separators(body, end)
    return calls


def _after_separators(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n;,":
        place += 1
    return place
