"""Anthropic's messages: requests, answers, streams and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator

from strop.agents.endpoint.calls import (
    AnswerHead,
    ApiRefusal,
    ModelAnswer,
    ModelCall,
    RequestFields,
    template_call,
    text_of,
)
from strop.agents.endpoint.chat_completions import function_schema
from strop.agents.interaction import ChatMessage
from strop.agents.tool_schema import JsonObject

WITHOUT_EFFECT = (
    "temperature top_p top_k metadata service_tier tool_choice thinking container mcp_servers cache_control "
    "context_management output_config"
)
"""Fields that are accepted and change nothing: the run decides how its policy is sampled."""


def read_messages_call(body: bytes) -> ModelCall:
    """Return the call of a request; ApiRefusal if it asks for what is not supported."""
    fields = RequestFields.read(body)
    given = fields.objects("messages")
    if not given:
        raise ApiRefusal(400, "messages: at least one message is required", param="messages")
    max_tokens = fields.whole_number("max_tokens")
    if max_tokens is None:
        raise ApiRefusal(400, "max_tokens: Field required", param="max_tokens")
    messages: list[ChatMessage] = []
    system = text_of(fields.get("system"), "system", ("text",))
    if system:
        messages.append({"role": "system", "content": system})
    for place, message in enumerate(given):
        messages += read_message(message, f"messages.{place}")
    call = ModelCall(
        messages=messages,
        tools=_tools(fields),
        model=fields.text("model"),
        max_tokens=max_tokens,
        stop=fields.strings("stop_sequences"),
        stream=fields.flag("stream"),
    )
    fields.refuse_unknown(WITHOUT_EFFECT)
    return call


def _tools(fields: RequestFields) -> list[JsonObject]:
    schemas = []
    for place, tool in enumerate(fields.objects("tools")):
        if tool.get("type") not in (None, "custom"):
            kind = tool["type"]
            raise ApiRefusal(400, f"tools.{place}: type {kind!r} is not served here", param="tools")
        schemas.append(function_schema({**tool, "parameters": tool.get("input_schema")}, place))
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "none":
        return []
    return schemas


def read_message(message: JsonObject, where: str) -> list[ChatMessage]:
    """Return a message as those that chat templates read: each tool result is one of its own."""
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant"):
        raise ApiRefusal(400, f"{where}.role: must be user or assistant, not {role!r}", param=where)
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, where, ())}]
    if role == "assistant":
        return [_assistant(content, where)]
    found: list[ChatMessage] = []
    texts = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            result = text_of(block.get("content"), where, ("text",))
            found.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": result})
        else:
            texts.append(block)
    if texts:
        found.append({"role": "user", "content": text_of(texts, where, ("text",))})
    return found


def _assistant(content: list[object], where: str) -> ChatMessage:
    calls = []
    texts = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "tool_use":
            calls.append(template_call(str(block.get("id")), str(block.get("name")), block.get("input")))
        else:
            texts.append(block)
    made: ChatMessage = {"role": "assistant", "content": text_of(texts, where, ("text",))}
    if calls:
        made["tool_calls"] = calls
    return made


def whole_message(answer: ModelAnswer) -> JsonObject:
    """Return the answer as one object."""
    head = _head(answer, len(answer.ids))
    return {**head, "content": _blocks(answer), **_stop(answer)}


class MessageStream:
    """The answer as the lines of a stream."""

    def __init__(self, call: ModelCall) -> None:
        self._in_text = False

    def begin(self, head: AnswerHead) -> Iterator[str]:
        yield _event("message_start", {"message": {**_head(head, 0), "content": []}})

    def text(self, piece: str) -> Iterator[str]:
        if not self._in_text:
            self._in_text = True
            empty = {"type": "text", "text": ""}
            yield _event("content_block_start", {"index": 0, "content_block": empty})
        yield _event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": piece}})

    def end(self, answer: ModelAnswer, rest: str) -> Iterator[str]:
        for place, block in enumerate(_blocks(answer)):
            if block["type"] == "text":
                if rest or not self._in_text:
                    yield from self.text(rest)
            else:
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                start = {"index": place, "content_block": {**block, "input": {}}}
                yield _event("content_block_start", start)
                yield _event("content_block_delta", {"index": place, "delta": delta})
            yield _event("content_block_stop", {"index": place})
        usage = {"output_tokens": len(answer.ids)}
        yield _event("message_delta", {"delta": _stop(answer), "usage": usage})
        yield _event("message_stop", {})

    def error(self, refusal: ApiRefusal) -> Iterator[str]:
        yield _event("error", {"error": message_error(refusal)["error"]})


def message_error(refusal: ApiRefusal) -> JsonObject:
    """Return a refusal in Anthropic's format."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
    }
    kind = kinds.get(refusal.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


def _stop(answer: ModelAnswer) -> JsonObject:
    """Return why the answer ended."""
    reason = "tool_use" if answer.calls else "end_turn"
    if answer.finish == "length":
        reason = "max_tokens"
    elif answer.stop_text and not answer.calls:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_text or None}


def _blocks(answer: ModelAnswer) -> list[JsonObject]:
    blocks: list[JsonObject] = []
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    return blocks


def _head(answer: AnswerHead, sampled: int) -> JsonObject:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": sampled},
    }


def _event(kind: str, content: JsonObject) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n"
