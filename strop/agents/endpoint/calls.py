"""One call of a model API, independent of whose API it is: the conversation, the answer, a refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop.agents.interaction import ChatMessage
from strop.agents.parsers.base import ToolCall
from strop.agents.tool_schema import JsonObject
from strop.data.chat import Message

MessageKey = tuple[object, ...]
"""Equal for two messages that mean the same to the model."""


class ApiRefusal(Exception):
    """A call that is answered with an error of the API."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "invalid_request_error",
        param: str | None = None,
        fails: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """invalid_request_error, invalid_api_key, context_length_exceeded ..."""
        self.param = param
        """The field of the request that is wrong."""
        self.fails = fails
        """The episode cannot be used. False: a limit of the run was reached, and what came before counts."""


@dataclass(frozen=True)
class ModelCall:
    """A request for one answer."""

    messages: Sequence[ChatMessage]
    """In the form that chat templates read: contents are text, arguments of tool calls are objects."""
    tools: Sequence[JsonObject] = ()
    """Schemas in the form of chat completions."""
    model: str = ""
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stream: bool = False
    wants_log_probs: bool = False
    reports_usage: bool = False
    """A stream ends with the numbers of tokens."""


@dataclass(frozen=True)
class AnswerHead:
    """What is known of an answer before its first token."""

    id: str
    model: str
    prompt_tokens: int


@dataclass(frozen=True)
class ModelAnswer(AnswerHead):
    """An answer of the policy, as text, and the tokens that it is."""

    content: str
    """The text outside tool calls."""
    calls: tuple[ToolCall, ...]
    """Each with an id."""
    finish: str
    """stop | length."""
    tokens: Sequence[str]
    """The text of each sampled token."""
    ids: Sequence[int]
    log_probs: Sequence[float]
    stop_text: str = ""
    """The stop text of the call before which the answer was cut."""

    def message(self) -> ChatMessage:
        """Return the answer as a message of the conversation."""
        message: ChatMessage = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [template_call(call.id, call.name, call.arguments) for call in self.calls]
        return message


def template_call(call_id: str, name: str, arguments: object) -> JsonObject:
    """Return a tool call as chat templates read it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(text: object) -> object:
    """Return the arguments of a tool call, which APIs send as JSON in a string; other text stays."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def message_key(message: Message) -> MessageKey:
    """Return what makes two messages equal. White space around the text of an answer does not count, because
    clients remove it, nor do ids of tool calls, which no model wrote."""
    content = str(message.get("content") or "")
    if message["role"] != "assistant":
        return (message["role"], content)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append((function["name"], json.dumps(function["arguments"], sort_keys=True)))
    return ("assistant", content.strip(), tuple(calls))


@dataclass(frozen=True)
class RequestFields:
    """The JSON object of a request, and which of its fields have been read."""

    values: Mapping[str, object]
    known: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, body: bytes) -> RequestFields:
        """Read the body of a request."""
        try:
            values = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiRefusal(400, f"The body is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ApiRefusal(400, "The body must be a JSON object.")
        return cls(values)

    def get(self, name: str) -> object:
        """Return a field; None where it is absent."""
        self.known.add(name)
        return self.values.get(name)

    def text(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ApiRefusal(400, f"{name} must be a string.", param=name)
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise ApiRefusal(400, f"{name} must be true or false.", param=name)
        return bool(value)

    def whole_number(self, name: str) -> int | None:
        """Return a number of at least 1, or None."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ApiRefusal(400, f"{name} must be a whole number of at least 1.", param=name)
        return value

    def objects(self, name: str) -> list[JsonObject]:
        """Return a list of objects; empty where the field is absent."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ApiRefusal(400, f"{name} must be a list of objects.", param=name)
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a list of texts, or one text as a list."""
        value = self.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ApiRefusal(400, f"{name} must be a string or a list of strings.", param=name)
        return tuple(item for item in value if item)

    def refuse_unknown(self, without_effect: str) -> None:
        """Refuse fields that were not read and are not among these words. A null is an absent field: many
        clients write all fields that they know."""
        given = {name for name, value in self.values.items() if value is not None}
        unknown = sorted(given - self.known - set(without_effect.split()))
        if unknown:
            names = ", ".join(unknown)
            raise ApiRefusal(400, f"Unrecognized request argument supplied: {names}.", param=unknown[0])


def text_of(content: object, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a message's content: a string, or a list of parts of these types."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiRefusal(400, f"{where} must be a string or a list of parts.", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise ApiRefusal(400, f"{where} has a part of type {kind!r}; this model reads text.", param=where)
        texts.append(str(part.get("text") or ""))
    return "".join(texts)
