"""Llama 3: the whole turn is a call, `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>`.

Several calls are separated by `;` or `,`, or are in a list.
"""

from __future__ import annotations

from strop.agents.parsers.base import (
    Found,
    Malformed,
    Parsed,
    ToolCall,
    call_in,
    parse_after_thought,
    read_json,
    without_end_of_turn,
)

TAG = "<|python_tag|>"


class Llama3JsonParser:
    """The format `llama3_json`."""

    def parse(self, text: str) -> Parsed:
        return parse_after_thought(text, _calls_in)


def _calls_in(text: str) -> Found:
    before, tag, after = text.partition(TAG)
    if tag:
        return before, json_calls(without_end_of_turn(after))
    body = without_end_of_turn(text).strip()
    if not body.startswith(("{", "[")):
        return text, []
    calls = json_calls(body)
    # A plain answer may be JSON too. Without the tag, only JSON that names a tool is a call.
    if any(isinstance(call, ToolCall) for call in calls) or '"name"' in body:
        return "", calls
    return text, []


def json_calls(body: str) -> list[ToolCall | Malformed]:
    """Return the calls of a text that has nothing but calls."""
    calls: list[ToolCall | Malformed] = []
    place = _after_separators(body, 0)
    while place < len(body):
        try:
            value, end = read_json(body, place)
        except ValueError as error:
            return [*calls, Malformed(body[place:].strip(), str(error))]
        items = value if isinstance(value, list) else [value]
        calls += [call_in(item, body[place:end]) for item in items]
        place = _after_separators(body, end)
    return calls


def _after_separators(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n;,":
        place += 1
    return place
