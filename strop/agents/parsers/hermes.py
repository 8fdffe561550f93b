"""Hermes, Qwen 2.5, Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated."""

from __future__ import annotations

from strop.agents.parsers.base import (
    Found,
    Malformed,
    Parsed,
    ToolCall,
    call_in,
    parse_after_thought,
    read_json,
)


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
