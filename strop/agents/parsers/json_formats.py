"""Tool calls as JSON, in the formats of three model families.

hermes        Hermes, Qwen 2.5, Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated
llama3_json   Llama 3: the whole turn is a call, {"name": ..., "parameters": {...}}, with or without
              <|python_tag|>; several calls are separated by `;` or `,`, or are in a list
mistral       [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], and newer [TOOL_CALLS]name[ARGS]{...},
              repeated
"""

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

LLAMA3_TAG = "<|python_tag|>"
MISTRAL_TAG = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w./-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\])?\s*(?=\{)")


class TaggedJson:
    """A JSON call between an opening and a closing text. The closing text inside a JSON string does not end
    the call."""

    def __init__(self, opening: str, closing: str) -> None:
        assert opening and closing
        self.opening = opening
        self.closing = closing

    def parse(self, text: str) -> Parsed:
        return parse_after_thought(text, self._calls_in)

    def _calls_in(self, text: str) -> Found:
        outside: list[str] = []
        calls: list[ToolCall | Malformed] = []
        place = 0
        while (start := text.find(self.opening, place)) >= 0:
            outside.append(text[place:start])
            call, place = self._call_at(text, start + len(self.opening))
            calls.append(call)
        outside.append(text[place:])
        return "".join(outside), calls

    def _call_at(self, text: str, start: int) -> tuple[ToolCall | Malformed, int]:
        """Return the call whose body begins at `start`, and where the text after it begins."""
        try:
            value, end = read_json(text, start)
        except ValueError as error:
            return self._malformed(text, start, start, str(error))
        close = text.find(self.closing, end)
        if close < 0:
            return self._malformed(text, start, end, f"the call is not closed by {self.closing.strip()}")
        if text[end:close].strip():
            return self._malformed(
                text, start, end, f"there is text between the JSON object and {self.closing.strip()}"
            )
        return call_in(value, text[start:end].strip()), close + len(self.closing)

    def _malformed(self, text: str, start: int, search_from: int, why: str) -> tuple[Malformed, int]:
        """Return a bad call, which extends to its end tag, or to the next call, or to the end of the text."""
        following = text.find(self.opening, search_from)
        end = following if following >= 0 else len(text)
        close = text.find(self.closing, search_from, end)
        if close >= 0:
            return Malformed(text[start:close].strip(), why), close + len(self.closing)
        return Malformed(text[start:end].strip(), why), end


class HermesParser(TaggedJson):
    """The format `hermes`."""

    def __init__(self) -> None:
        super().__init__("<tool_call>", "</tool_call>")


class Llama3JsonParser:
    """The format `llama3_json`."""

    def parse(self, text: str) -> Parsed:
        return parse_after_thought(text, _llama3_calls)


def _llama3_calls(text: str) -> Found:
    before, tag, after = text.partition(LLAMA3_TAG)
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


class MistralParser:
    """The format `mistral`."""

    def parse(self, text: str) -> Parsed:
        return parse_after_thought(text, _mistral_calls)


def _mistral_calls(text: str) -> Found:
    before, tag, after = text.partition(MISTRAL_TAG)
    if not tag:
        return text, []
    calls: list[ToolCall | Malformed] = []
    for body in without_end_of_turn(after).split(MISTRAL_TAG):
        if body.lstrip().startswith(("[", "{")):
            calls += json_calls(body)
        else:
            calls.append(_named_call(body))
    return before, calls


def _named_call(body: str) -> ToolCall | Malformed:
    if not body.strip():
        return Malformed(MISTRAL_TAG, f"nothing follows {MISTRAL_TAG}")
    named = _MISTRAL_NAMED.match(body)
    if named is None:
        return Malformed(
            body.strip(),
            f"after {MISTRAL_TAG} a list of calls, or the name of a tool and a JSON object, must follow",
        )
    try:
        arguments, end = read_json(body, named.end())
    except ValueError as error:
        return Malformed(body.strip(), str(error))
    if body[end:].strip():
        return Malformed(body.strip(), "there is text after the JSON object of the call")
    return call_in({"name": named.group(1), "arguments": arguments, "id": named.group(2)}, body.strip())
