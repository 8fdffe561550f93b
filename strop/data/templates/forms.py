"""The forms of a message that a chat template reads: contents as text or as parts, arguments of calls as
objects or as JSON text.

A template drops what comes in another form, or writes Python's notation of it, without an error. So each
template is tried once with a probe, and messages are converted.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
ROLES = ("user", "system", "assistant", "tool")
CONTENT = "CONTENTxOFxAxMESSAGE"
QUESTION = "Hello?"
ARGUMENTS = {"probe_key": "probe_value"}
NAME = "probe_tool"
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

    def fitted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages in the forms that the template reads."""
        return [self._fitted(message) for message in messages]

    def _fitted(self, message: Message) -> dict[str, Any]:
        found = dict(message)
        content = found.get("content")
        if isinstance(content, str) and found.get("role") in self.needs_parts:
            found["content"] = as_parts(content)
        elif isinstance(content, list) and found.get("role") in self.needs_text and _is_text(content):
            found["content"] = "".join(str(part["text"]) for part in content)
        calls = found.get("tool_calls")
        if isinstance(calls, list):
            found["tool_calls"] = [self._fitted_call(call) for call in calls]
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


def forms_of(tokenizer: PreTrainedTokenizerBase, template: str | None) -> Forms:
    """Return the forms that a template reads; None is the tokenizer's."""
    return _forms_of(tokenizer, template, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=32)
def _forms_of(tokenizer: PreTrainedTokenizerBase, template: str | None, own: str) -> Forms:
    """`own` is the tokenizer's template, which may change."""
    probe = _Probe(tokenizer, template)
    needs_parts = set()
    needs_text = set()
    user: object = QUESTION
    for role in ROLES:  # first the user, who speaks in every probe
        reads_text = probe.shows(role, CONTENT, user)
        reads_parts = probe.shows(role, as_parts(CONTENT), user)
        if reads_parts and not reads_text:
            needs_parts.add(role)
            if role == "user":
                user = as_parts(QUESTION)
        elif reads_text and not reads_parts:
            needs_text.add(role)
    return Forms(frozenset(needs_parts), frozenset(needs_text), probe.needs_argument_text(user))


@dataclass(frozen=True)
class _Probe:
    """A template that is tried out."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None

    def shows(self, role: str, content: object, user: object) -> bool:
        """Whether the template writes the content of a message as it is; `user` is what the user says before
        it."""
        asked = {"role": "user", "content": user}
        shown = {"role": role, "content": content}
        conversation: list[dict[str, Any]] = [asked, shown]
        if role == "user":
            conversation = [shown]
        elif role == "system":
            conversation = [shown, asked]
        elif role == "tool":
            conversation = [
                asked,
                self._call(ARGUMENTS),
                {**shown, "name": NAME, "tool_call_id": "probe0000"},
            ]
        written = self._written(conversation)
        if written is None:
            return False
        return CONTENT in written and f"'{CONTENT}'" not in written and f'"{CONTENT}"' not in written

    def needs_argument_text(self, user: object) -> bool:
        """Whether the template fails with arguments as an object, or writes Python's notation of it."""
        asked = {"role": "user", "content": user}
        written = self._written([asked, self._call(ARGUMENTS)])
        if written is not None and "'probe_key'" not in written:
            return False
        as_text = self._written([asked, self._call(json.dumps(ARGUMENTS))])
        return as_text is not None and '"probe_key"' in as_text

    def _call(self, arguments: object) -> dict[str, Any]:
        call = {"type": "function", "id": "probe0000", "function": {"name": NAME, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _written(self, conversation: list[dict[str, Any]]) -> str | None:
        """Return what the template writes; None if it fails."""
        try:
            written = self.tokenizer.apply_chat_template(
                conversation,
                tools=[TOOL],
                chat_template=self.template,
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


def refuse_lost_parts(message: Message, rendered: str, turn: int) -> None:
    """ValueError if something of an assistant turn is not in its text, of which the model would not learn."""
    lost = _lost_part(message, rendered)
    if lost is not None:
        raise ValueError(
            f"The chat template leaves out {lost} of message {turn}. Use a template that writes it "
            "(data.chat_template), or remove it from the row."
        )


def _lost_part(message: Message, rendered: str) -> str | None:
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if name is not None and str(name) not in rendered:
            return f"the tool call {name!r}"
    for name in THOUGHTS:
        thought = message.get(name)
        if isinstance(thought, str) and _is_lost(thought, rendered):
            return repr(name)
    content = message.get("content") or ""
    parts = as_parts(content) if isinstance(content, str) else content
    for part in parts:
        said = part.get("text") if isinstance(part, Mapping) else None
        if isinstance(said, str) and _is_lost(said.rpartition("</think>")[2], rendered):
            return "the content"
    return None


def _is_lost(said: str, rendered: str) -> bool:
    """Whether the last word is missing; templates change the white space around and in texts."""
    words = said.split()
    return bool(words) and words[-1] not in rendered
