"""The format of the model's own chat template: the template writes a probe call, and the format is read from
it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strop.agents.parsers.base import (
    Found,
    Malformed,
    Parsed,
    ToolCall,
    ToolParser,
    call_in,
    kind_of,
    parse_after_thought,
    read_json,
    without_end_of_turn,
)
from strop.agents.parsers.harmony import HarmonyParser
from strop.agents.parsers.json_formats import HermesParser, Llama3JsonParser, MistralParser, TaggedJson
from strop.agents.parsers.pythonic import PythonicParser
from strop.agents.parsers.qwen import QwenParser
from strop.agents.tool_schema import JsonObject
from strop.data.templates.forms import ARGUMENTS, NAME, TOOL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTENT = "Probing."
_ADVICE = (
    "Name the format of its calls in actor_rollout_ref.rollout.multi_turn.format (hermes, llama3_json, qwen "
    "...)."
)


def template_parser(tokenizer: PreTrainedTokenizerBase | None) -> ToolParser:
    """Return the parser of the calls that the tokenizer's chat template writes; ValueError if it writes
    none."""
    written = written_call(tokenizer)
    parser = _known(written) or _learned(written)
    if parser is None:
        raise ValueError(f"The chat template writes tool calls in an unknown form: {written!r}. {_ADVICE}")
    return parser


def written_call(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return what the template adds to an assistant turn that makes a call."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"multi_turn.format=template needs a tokenizer with a chat template, and there is none. {_ADVICE}"
        )
    function = {"name": NAME, "arguments": ARGUMENTS}
    calls = [{"type": "function", "id": "probe0000", "function": function}]
    plain = _rendered(tokenizer, {"role": "assistant", "content": CONTENT})
    full = _rendered(tokenizer, {"role": "assistant", "content": CONTENT, "tool_calls": calls})
    header, _, tail = plain.partition(CONTENT)
    written = ""
    if full.startswith(header):
        written = full.removeprefix(header).lstrip().removeprefix(CONTENT)
    elif CONTENT in full:  # gpt-oss has another header for what is said before a call
        written = full.rpartition(CONTENT)[2]
    if tail and written.endswith(tail):
        written = written.removesuffix(tail)
    else:  # some templates end a turn with calls in another way than a plain one
        written = without_end_of_turn(written)
    if NAME not in written:
        raise ValueError(
            f"The chat template does not write tool calls (of a probe it wrote {written!r}). {_ADVICE}"
        )
    return written


def _rendered(tokenizer: PreTrainedTokenizerBase, turn: JsonObject) -> str:
    messages = [{"role": "user", "content": "Hello"}, turn]
    try:
        return str(tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False))
    except Exception as error:  # a template is a program, and may raise anything
        raise ValueError(
            f"The chat template cannot write a tool call: {type(error).__name__}: {error}. {_ADVICE}"
        ) from error


def _known(written: str) -> ToolParser | None:
    if f"<function={NAME}>" in written:
        return QwenParser()
    if "<tool_call>" in written and isinstance(HermesParser().parse(written).calls[0], ToolCall):
        return HermesParser()
    if f"to=functions.{NAME}<|channel|>" in written or f"to=functions.{NAME} " in written:
        return HarmonyParser()
    if "[TOOL_CALLS]" in written:
        return MistralParser()
    if "<|python_tag|>" in written or written.lstrip().startswith('{"name"'):
        return Llama3JsonParser()
    if f"[{NAME}(" in written:
        return PythonicParser()
    return None


def _learned(written: str) -> ToolParser | None:
    """Return a parser for `opening {"name", "arguments"} closing`, or for `opening name between {arguments}
    closing`."""
    for value, start, end in _json_values(written):
        opening = written[:start]
        closing = written[end:]
        if value == ARGUMENTS:
            before, _, between = opening.rpartition(NAME)
            if before.strip() and between.strip():
                return NamedJson(before.strip(), between.strip(), closing.strip())
        elif _is_the_probe(value) and opening.strip(" \n[") and closing.strip(" \n]"):
            return TaggedJson(opening.strip(), closing.strip())
    return None


def _json_values(text: str) -> Iterator[tuple[object, int, int]]:
    """Yield every JSON object in a text, with its start and its end."""
    for start, letter in enumerate(text):
        if letter == "{":
            try:
                value, end = read_json(text, start)
            except ValueError:
                continue
            yield value, start, end


def _is_the_probe(value: object) -> bool:
    call = call_in(value, "")
    return isinstance(call, ToolCall) and call.name == NAME and call.arguments == ARGUMENTS


class NamedJson:
    """`opening name between {arguments} closing`."""

    def __init__(self, opening: str, between: str, closing: str) -> None:
        self.opening = opening
        self.between = between
        self.closing = closing

    def parse(self, text: str) -> Parsed:
        return parse_after_thought(text, self._calls_in)

    def _calls_in(self, text: str) -> Found:
        outside, *bodies = text.split(self.opening)
        calls: list[ToolCall | Malformed] = []
        for body in bodies:
            call, rest = self._call(body)
            calls.append(call)
            outside += rest
        return outside, calls

    def _call(self, body: str) -> tuple[ToolCall | Malformed, str]:
        """Return the call after an opening, and the text after the call."""
        name, between, after = body.partition(self.between)
        if not between:
            return Malformed(body.strip(), f"after the name of the tool {self.between!r} must follow"), ""
        try:
            arguments, end = read_json(after)
        except ValueError as error:
            return Malformed(body.strip(), str(error)), ""
        if not isinstance(arguments, dict):
            why = f"the arguments must be a JSON object, not {kind_of(arguments)}"
            return Malformed(body.strip(), why), ""
        rest = after[end:].lstrip()
        if not rest.startswith(self.closing):
            return Malformed(body.strip(), f"the call is not closed by {self.closing!r}"), ""
        call = call_in({"name": name.strip(), "arguments": arguments}, body.strip())
        return call, rest.removeprefix(self.closing)
