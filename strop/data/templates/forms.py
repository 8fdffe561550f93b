"""The forms of a message that a chat template reads: contents as text or as parts, arguments of calls as
objects or as JSON text, no content as "" or as none.

A template drops what comes in another form, or writes Python's notation of it, without an error. So each
template is tried once with a probe, and messages are converted.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
TEXT: Final = "text"
PARTS: Final = "parts"
CONTENT = "CONTENTxOFxAxMESSAGE"
QUESTION = "Hello?"
VALUE = "probe_value"
ARGUMENTS = {"probe_key": VALUE}
NAME = "probe_tool"
CALL_ID = "probe0000"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A probe."}},
        },
    },
}

KEEP_NO_CONTENT = (
    "{%- set opened = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- set opened.messages = opened.messages + [dict({'content': none}, **message)] -%}"
    "{%- endfor -%}{%- set messages = opened.messages -%}{{ '' }}"
)
"""Goes before a template that writes calls where the content is none: transformers 5.23 takes keys whose
value is None out of messages, so that such a template finds no content at all."""
_PART = re.compile(r"""["']text["']:\s*["']$""")
"""What JSON and Python write before the text of a part."""


def template_errors() -> tuple[type[Exception], ...]:
    """Return what a chat template raises for messages that it cannot write."""
    import jinja2

    return (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True)
class Forms:
    """What a template reads. What cannot be tried out, because the template fails, is not converted."""

    needs_parts: frozenset[str] = frozenset()
    """Roles of which it reads contents as parts only."""
    needs_text: frozenset[str] = frozenset()
    """Roles of which it reads contents as text only."""
    argument_text: bool = False
    """It writes arguments of calls as they are, so they must be JSON text."""
    call_without_content: str | None = ""
    """The content of a turn that only makes calls. DeepSeek's templates write calls where it is none."""
    preamble: str = ""
    """Must go before the template: KEEP_NO_CONTENT or nothing."""

    def fitted(self, messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
        """Return the messages in the forms that the template reads."""
        found = [self._fitted(message) for message in messages]
        has_parts = any(isinstance(message.get("content"), list) for message in found)
        if has_parts and "is string" not in template:
            for message in found:
                if isinstance(message.get("content"), str) and message["role"] not in self.needs_text:
                    message["content"] = as_parts(message["content"])
        return found

    def _fitted(self, message: Message) -> dict[str, Any]:
        found = dict(message)
        content = found.get("content") or ""
        calls = found.get("tool_calls")
        if "tool_calls" in found and not calls:
            del found["tool_calls"]  # some templates only ask whether it is there (Llama 3)
        if isinstance(calls, list) and calls:
            found["tool_calls"] = [self._fitted_call(call) for call in calls]
        if calls and not content and self.call_without_content is None:
            found["content"] = None
        elif isinstance(content, str):
            found["content"] = as_parts(content) if found.get("role") in self.needs_parts else content
        elif isinstance(content, list) and found.get("role") in self.needs_text and _is_text(content):
            found["content"] = "".join(str(part["text"]) for part in content)
        return found

    def _fitted_call(self, call: object) -> object:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._fitted_call(call["function"])}
        arguments = call.get("arguments")
        if self.argument_text and isinstance(arguments, Mapping):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if not self.argument_text and isinstance(arguments, str):
            return {**call, "arguments": _object_in(arguments)}
        return call


def as_parts(content: str) -> list[dict[str, str]]:
    """Return a text as a list of parts."""
    return [{"type": "text", "text": content}]


@functools.lru_cache(maxsize=32)
def forms_of(tokenizer: PreTrainedTokenizerBase, template: str | None, own: str) -> Forms:
    """Return the forms that a template reads; None is the tokenizer's `own`, which may change."""
    probe = _Probe(tokenizer, template)
    asked: Message = {"role": "user", "content": QUESTION}
    wanted = {"user": probe.wanted([], {"role": "user"}, [])}
    if wanted["user"] == PARTS:
        asked = {"role": "user", "content": as_parts(QUESTION)}
    wanted["system"] = probe.wanted([], {"role": "system"}, [asked])
    wanted["assistant"] = probe.wanted([asked], {"role": "assistant"}, [])
    as_text, content, preamble = probe.call_form(asked)
    probe = replace(probe, preamble=preamble)
    called = [asked, probe_call(content, as_text=as_text)]
    wanted["tool"] = probe.wanted(called, {"role": "tool", "name": NAME, "tool_call_id": CALL_ID}, [])
    return Forms(
        frozenset(role for role, form in wanted.items() if form == PARTS),
        frozenset(role for role, form in wanted.items() if form == TEXT),
        as_text,
        content,
        preamble,
    )


def with_preamble(tokenizer: PreTrainedTokenizerBase, template: str | None, preamble: str) -> str | None:
    """Return the template with the preamble before it; None is the tokenizer's own."""
    if not preamble:
        return template
    return preamble + tokenizer.get_chat_template(template, [TOOL])


def probe_call(content: str | None, *, as_text: bool) -> Message:
    """Return a turn that makes a call, with its arguments as text or as an object."""
    arguments = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    call = {"type": "function", "id": CALL_ID, "function": {"name": NAME, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


@dataclass(frozen=True)
class _Probe:
    """A template that is tried out."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    preamble: str = ""

    def wanted(
        self, before: Sequence[Message], message: Message, after: Sequence[Message]
    ) -> Literal["text", "parts"] | None:
        """Return the one form in which the template writes the content of a message as it is; None if both
        or none."""
        reads_text = self._shows([*before, {**message, "content": CONTENT}, *after])
        reads_parts = self._shows([*before, {**message, "content": as_parts(CONTENT)}, *after])
        if reads_text == reads_parts:
            return None
        return TEXT if reads_text else PARTS

    def _shows(self, conversation: Sequence[Message]) -> bool:
        """Whether the content is written as it is, or as JSON, without the notation of a part."""
        written = self._written(conversation)
        if written is None:
            return False
        before, found, _ = written.partition(CONTENT)
        return bool(found) and not before.endswith("'") and _PART.search(before) is None

    def call_form(self, asked: Message) -> tuple[bool, str | None, str]:
        """Return how the template writes a call: whether with its arguments as text, with which content, and
        with what before the template. With objects it may fail, or write Python's notation of them."""
        ways: tuple[tuple[str | None, str], ...] = (("", ""), (None, ""), (None, KEEP_NO_CONTENT))
        for content, preamble in ways:
            probe = replace(self, preamble=preamble)
            written = probe._written([asked, probe_call(content, as_text=False)])
            if written is not None and VALUE in written and "'probe_key'" not in written:
                return False, content, preamble
            written = probe._written([asked, probe_call(content, as_text=True)])
            if written is not None and f'"{VALUE}"' in written:
                return True, content, preamble
        return False, "", ""

    def _written(self, conversation: Sequence[Message]) -> str | None:
        """Return what the template writes; None if it fails."""
        try:
            written = self.tokenizer.apply_chat_template(
                [dict(message) for message in conversation],
                tools=[TOOL],
                chat_template=with_preamble(self.tokenizer, self.template, self.preamble),
                tokenize=False,
            )
        except template_errors():
            return None
        return str(written)


def _is_text(parts: list[Any]) -> bool:
    """Whether all parts are texts."""
    return all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts)


def _object_in(arguments: str) -> object:
    """Return the arguments of a call as an object; text that holds none is unchanged."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    if isinstance(value, dict):
        return value
    return arguments


# --- what a template leaves out -----------------------------------------------------------------------------

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of the thought of an assistant turn."""
THOUGHT_END = "</think>"
"""Before it, a content has a thought."""
OTHER_BEGINNING = "the model would learn an answer to another beginning"


def refuse_lost_parts(message: Message, rendered: str, turn: int) -> None:
    """ValueError if something of an assistant turn is not in its text, of which the model would not learn."""
    lost = _lost_part(message, rendered)
    if lost is not None:
        raise ValueError(
            f"The chat template leaves out {lost} of message {turn}. Set data.chat_template to the file of "
            "one that writes it (a changed copy of the model's), or remove it from the row."
        )


def _lost_part(message: Message, rendered: str) -> str | None:
    names = [name for call in message.get("tool_calls") or () if (name := _name_of(call)) is not None]
    for name in names:
        if rendered.count(name) < names.count(name):  # some templates write the first call only
            return f"the tool call {name!r}"
    for name in THOUGHTS:
        thought = message.get(name)
        if isinstance(thought, str) and _is_lost(thought, rendered):
            return repr(name)
    content = message.get("content") or ""
    parts = as_parts(content) if isinstance(content, str) else content
    for part in parts:
        said = part.get("text") if isinstance(part, Mapping) else None
        thought, _, answer = said.rpartition(THOUGHT_END) if isinstance(said, str) else ("", "", "")
        if _is_lost(thought.rpartition("<think>")[2], rendered):
            return f"the thought in the content (up to {THOUGHT_END})"
        if _is_lost(answer, rendered):
            return "the content"
    return None


def opening_advice(template: str, kwargs: Mapping[str, object], message: Message) -> str:
    """Why the generation prompt and the assistant's turn must not begin differently, and what to set: mostly
    only one of them has a thought. `kwargs`: the variables of the template."""
    thinks = THOUGHT_END in str(message.get("content")) or any(message.get(name) for name in THOUGHTS)
    if "enable_thinking" in template and kwargs.get("enable_thinking") is not thinks:
        key = "data.apply_chat_template_kwargs.enable_thinking"
        thought = "a thought" if thinks else "no thought"
        return f"{OTHER_BEGINNING}. The row has {thought}: set {key}={str(thinks).lower()}."
    change = "the generation prompt opens no thought"
    if thinks:
        change = f"turns keep their thoughts (some templates cut contents at {THOUGHT_END})"
    return (
        f"{OTHER_BEGINNING}. Set data.chat_template to the file of a template in which both begin alike: a "
        f"copy of the model's chat_template.jinja, changed so that {change}."
    )


def _name_of(call: object) -> str | None:
    """Return the name of the function that a call names."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return None if name is None else str(name)


def _is_lost(said: str, rendered: str) -> bool:
    """Whether the last word is missing; templates change the white space around and in texts."""
    words = said.split()
    return bool(words) and words[-1] not in rendered
