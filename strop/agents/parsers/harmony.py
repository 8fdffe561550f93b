"""Tool calls of gpt-oss (harmony): messages with a header, of which those to a function are calls.

<|channel|>analysis<|message|>a thought<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The recipient may stand before the channel, and the first message has no <|start|>assistant: the prompt ends
with it. Calls are read from headers only, so what a thought or an answer says of them is text.
"""

from __future__ import annotations

import re

from strop.agents.parsers.base import (
    Found,
    Malformed,
    Parsed,
    ToolCall,
    kind_of,
    parse_after_thought,
    read_json,
)

START = "<|start|>"
ROLE = "assistant"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z")


class HarmonyParser:
    """The format `gpt-oss`."""

    def parse(self, text: str) -> Parsed:
        return parse_after_thought(text, _calls_in)


def _calls_in(text: str) -> Found:
    """The content is that of final answers and of comments to the user, without analysis."""
    outside: list[str] = []
    calls: list[ToolCall | Malformed] = []
    place = 0
    while (opened := text.find(MESSAGE, place)) >= 0:
        before, header = _header(text[place:opened])
        outside.append(before)
        body = opened + len(MESSAGE)
        if recipient := _RECIPIENT.search(header):
            call, place = _call(recipient[1], text, body)
            calls.append(call)
            continue
        end = _end_of_message(text, body)
        if not header.startswith(f"{CHANNEL}analysis"):
            outside.append(text[body : end.start()])
        place = end.end()
    before, header = _header(text[place:])
    outside.append(before)
    if recipient := _RECIPIENT.search(header):
        calls.append(Malformed(header, f"no {MESSAGE} with arguments follows", recipient[1]))
    return "".join(outside), calls


def _header(text: str) -> tuple[str, str]:
    """Return the text before a header, and the header without its role."""
    before, start, header = text.rpartition(START)
    if start:
        return before, header.removeprefix(ROLE)
    if text.lstrip().startswith("to=") and CHANNEL in text:
        return "", text
    before, channel, header = text.partition(CHANNEL)
    return before, channel + header


def _call(name: str, text: str, body: int) -> tuple[ToolCall | Malformed, int]:
    """Return the call to `name` with the arguments at `body`, and where the text after it begins."""
    try:
        arguments, end = read_json(text, body)
    except ValueError as error:
        return _malformed(name, text, body, body, str(error))
    while end < len(text) and text[end].isspace():
        end += 1
    close = _end_of_message(text, end)
    if close.start() > end:
        return _malformed(name, text, body, end, "there is text after the JSON object of the call")
    if not isinstance(arguments, dict):
        why = f"the arguments must be a JSON object, not {kind_of(arguments)}"
        return _malformed(name, text, body, end, why)
    return ToolCall(name, arguments), close.end()


def _malformed(name: str, text: str, body: int, search_from: int, why: str) -> tuple[Malformed, int]:
    """Return a bad call, which extends to the end of its message."""
    end = _end_of_message(text, search_from)
    return Malformed(text[body : end.start()].strip(), why, name), end.end()


def _end_of_message(text: str, place: int) -> re.Match[str]:
    found = _END.search(text, place)
    assert found is not None  # at the latest where the text ends
    return found
