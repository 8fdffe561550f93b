"""Qwen 3 Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`.

Values are bare text (`Raw`); the tool's schema decides their types.
"""

from __future__ import annotations

import re

from strop.agents.parsers.base import Found, Malformed, Parsed, Raw, ToolCall, parse_after_thought

_OPEN = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]*)>")
_CLOSE = re.compile(r"</function>(?:\s*</tool_call>)?")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>(.*?)</parameter>", re.DOTALL)
_TAG_WITHOUT_FUNCTION = re.compile(r"<tool_call>(?!\s*<function=)(.*?)(?:</tool_call>|$)", re.DOTALL)


class QwenParser:
    """The format `qwen`."""

    def parse(self, text: str) -> Parsed:
        return parse_after_thought(text, _calls_in)


def _calls_in(text: str) -> Found:
    outside: list[str] = []
    calls: list[ToolCall | Malformed] = []
    place = 0
    while opened := _OPEN.search(text, place):
        _add_outside(text[place : opened.start()], outside, calls)
        closed = _CLOSE.search(text, opened.end())
        following = _OPEN.search(text, opened.end())
        if closed is None or (following is not None and following.start() < closed.start()):
            place = following.start() if following is not None else len(text)
            unclosed = text[opened.start() : place].strip()
            calls.append(Malformed(unclosed, "the call is not closed by </function>"))
            continue
        body = text[opened.end() : closed.start()]
        calls.append(_call(opened.group(1).strip(), body, text[opened.start() : closed.end()]))
        place = closed.end()
    _add_outside(text[place:], outside, calls)
    return "".join(outside), calls


def _add_outside(text: str, outside: list[str], calls: list[ToolCall | Malformed]) -> None:
    """Add text between calls; a tag without a function in it is a malformed call."""
    for tag in _TAG_WITHOUT_FUNCTION.finditer(text):
        calls.append(Malformed(tag.group(0).strip(), "there is no <function=NAME> in the call"))
    outside.append(_TAG_WITHOUT_FUNCTION.sub("", text))


def _call(name: str, body: str, text: str) -> ToolCall | Malformed:
    if not name:
        return Malformed(text, "<function=> has no name of a tool")
    arguments: dict[str, Raw] = {}
    place = 0
    while parameter := _PARAMETER.match(body, place):
        key = parameter.group(1).strip()
        if not key:
            return Malformed(text, "<parameter=> has no name")
        arguments[key] = Raw(parameter.group(2).removeprefix("\n").removesuffix("\n"))
        place = parameter.end()
    if body[place:].strip():
        return Malformed(
            text, "a <parameter=NAME> is not closed by </parameter>, or there is text between parameters"
        )
    return ToolCall(name, dict(arguments))
