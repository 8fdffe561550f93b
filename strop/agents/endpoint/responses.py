"""OpenAI's responses: requests, answers, streams and errors. A call has its whole input."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from strop.agents.endpoint.calls import (
    AnswerHead,
    ApiRefusal,
    ModelAnswer,
    ModelCall,
    RequestFields,
    read_arguments,
    template_call,
    text_of,
)
from strop.agents.endpoint.chat_completions import function_schema
from strop.agents.interaction import ChatMessage
from strop.agents.tool_schema import JsonObject

WITHOUT_EFFECT = (
    "temperature top_p user metadata store parallel_tool_calls reasoning service_tier tool_choice include "
    "truncation safety_identifier prompt_cache_key prompt_cache_retention top_logprobs max_tool_calls "
    "stream_options"
)
"""Fields that are accepted and change nothing: the run decides how its policy is sampled."""
TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def read_responses_call(body: bytes) -> ModelCall:
    """Return the call of a request; ApiRefusal if it asks for what is not supported."""
    fields = RequestFields.read(body)
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if fields.get(name):
            raise ApiRefusal(400, f"{name} is not served here: send the whole input.", param=name)
    wanted = fields.get("text")
    if isinstance(wanted, dict) and not _is_free_text(wanted.get("format")):
        raise ApiRefusal(400, "text.format can only be text: answers are sampled freely.", param="text")
    messages: list[ChatMessage] = []
    instructions = fields.text("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = fields.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        messages += _messages(fields.objects("input"))
    if not messages or messages[-1]["role"] == "system":
        raise ApiRefusal(400, "input must have at least one item.", param="input")
    call = ModelCall(
        messages=messages,
        tools=_tools(fields),
        model=fields.text("model"),
        max_tokens=fields.whole_number("max_output_tokens"),
        stream=fields.flag("stream"),
    )
    fields.refuse_unknown(WITHOUT_EFFECT)
    return call


def _is_free_text(wanted: object) -> bool:
    return wanted is None or (isinstance(wanted, dict) and wanted.get("type", "text") == "text")


def _tools(fields: RequestFields) -> list[JsonObject]:
    schemas = []
    for place, tool in enumerate(fields.objects("tools")):
        if tool.get("type") != "function":
            kind = tool.get("type")
            raise ApiRefusal(400, f"tools[{place}] is of type {kind!r}, not a function.", param="tools")
        schemas.append(function_schema(tool, place))
    if fields.get("tool_choice") == "none":
        return []
    return schemas


def _messages(items: list[JsonObject]) -> list[ChatMessage]:
    """Return the items as messages: text and calls of one answer are items in a row, and one message here."""
    messages: list[ChatMessage] = []
    for place, item in enumerate(items):
        where = f"input[{place}]"
        kind = item.get("type", "message")
        if kind == "function_call_output":
            result = text_of(item.get("output"), where, TEXT_PARTS)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": result})
        elif kind == "function_call":
            arguments = read_arguments(item.get("arguments"))
            call = template_call(str(item.get("call_id")), str(item.get("name")), arguments)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "message":
            role = ROLES.get(str(item.get("role")))
            if role is None:
                raise ApiRefusal(400, f"{where}.role is {item.get('role')!r}.", param=where)
            messages.append({"role": role, "content": text_of(item.get("content"), where, TEXT_PARTS)})
        else:
            raise ApiRefusal(400, f"{where} is of type {kind!r}, which is not served here.", param=where)
    return messages


def whole_response(answer: ModelAnswer) -> JsonObject:
    """Return the answer as one object."""
    return {**_head(answer, _status(answer)), "output": _items(answer), "usage": _usage(answer)}


class ResponseStream:
    """The answer as the lines of a stream."""

    def __init__(self, call: ModelCall) -> None:
        self._number = 0
        self._where: JsonObject = {}
        """Of the text; empty before its first piece."""

    def begin(self, head: AnswerHead) -> Iterator[str]:
        self._message_id = _message_id(head)
        begun = {"response": {**_head(head, "in_progress"), "output": [], "usage": None}}
        yield self._event("response.created", begun)
        yield self._event("response.in_progress", begun)

    def text(self, piece: str) -> Iterator[str]:
        if not self._where:
            self._where = {"output_index": 0, "item_id": self._message_id}
            item = {**_message_item(self._message_id), "status": "in_progress", "content": []}
            yield self._event("response.output_item.added", {**self._where, "item": item})
            part = {"content_index": 0, "part": _text_part("")}
            yield self._event("response.content_part.added", {**self._where, **part})
        delta = {"content_index": 0, "delta": piece, "logprobs": []}
        yield self._event("response.output_text.delta", {**self._where, **delta})

    def end(self, answer: ModelAnswer, rest: str) -> Iterator[str]:
        for place, item in enumerate(_items(answer)):
            where = {"output_index": place, "item_id": item["id"]}
            if item["type"] == "message":
                if rest or not self._where:
                    yield from self.text(rest)
                [part] = item["content"]
                inside = {**where, "content_index": 0}
                done = {**inside, "text": part["text"], "logprobs": []}
                yield self._event("response.output_text.done", done)
                yield self._event("response.content_part.done", {**inside, "part": part})
            else:
                arguments = item["arguments"]
                started = {**item, "status": "in_progress", "arguments": ""}
                yield self._event("response.output_item.added", {**where, "item": started})
                yield self._event("response.function_call_arguments.delta", {**where, "delta": arguments})
                done = {**where, "name": item["name"], "arguments": arguments}
                yield self._event("response.function_call_arguments.done", done)
            yield self._event("response.output_item.done", {**where, "item": item})
        yield self._event(f"response.{_status(answer)}", {"response": whole_response(answer)})

    def error(self, refusal: ApiRefusal) -> Iterator[str]:
        yield self._event("error", {"code": refusal.code, "message": str(refusal), "param": refusal.param})

    def _event(self, kind: str, content: JsonObject) -> str:
        data = json.dumps({"type": kind, "sequence_number": self._number, **content})
        self._number += 1
        return f"event: {kind}\ndata: {data}\n\n"


def _status(answer: ModelAnswer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _items(answer: ModelAnswer) -> list[JsonObject]:
    items: list[JsonObject] = []
    if answer.content or not answer.calls:
        message = {**_message_item(_message_id(answer)), "status": "completed"}
        items.append({**message, "content": [_text_part(answer.content)]})
    for call in answer.calls:
        arguments = json.dumps(call.arguments)
        function = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
        items.append({**function, "arguments": arguments, "status": "completed"})
    return items


def _message_id(head: AnswerHead) -> str:
    return f"msg_{head.id}"


def _message_item(message_id: str) -> JsonObject:
    return {"type": "message", "id": message_id, "role": "assistant"}


def _text_part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(answer: ModelAnswer) -> JsonObject:
    sampled = len(answer.ids)
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + sampled,
    }


def _head(answer: AnswerHead, status: str) -> JsonObject:
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": answer.model,
        "status": status,
        "incomplete_details": details,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }
