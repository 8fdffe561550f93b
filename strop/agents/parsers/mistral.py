"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and newer `[TOOL_CALLS]name[ARGS]{...}`,
repeated."""

from __future__ import annotations

import re

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
from strop.agents.parsers.llama3_json import json_calls

TAG = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w./-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralParser:
    """The format `mistral`."""

    def parse(self, text: str) -> Parsed:
        return parse_after_thought(text, _calls_in)


def _calls_in(text: str) -> Found:
    before, tag, after = text.partition(TAG)
    if not tag:
        return text, []
    calls: list[ToolCall | Malformed] = []
    for body in without_end_of_turn(after).split(TAG):
        if body.lstrip().startswith(("[", "{")):
            calls += json_calls(body)
        else:
            calls.append(_named_call(body))
    return before, calls


def _named_call(body: str) -> ToolCall | Malformed:
    if not body.strip():
        return Malformed(TAG, f"nothing follows {TAG}")
    named = _NAMED.match(body)
    if named is None:
        return Malformed(
            body.strip(), f"after {TAG} a list of calls, or the name of a tool and a JSON object, must follow"
        )
    try:
        arguments, end = read_json(body, named.end())
    except ValueError as error:
        return Malformed(body.strip(), str(error))
    if body[end:].strip():
        return Malformed(body.strip(), "there is text after the JSON object of the call")
    return call_in({"name": named.group(1), "arguments": arguments, "id": named.group(2)}, body.strip())
