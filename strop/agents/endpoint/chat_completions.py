"""OpenAI's chat completions: requests, answers, streams and errors."""

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
from strop.agents.interaction import ChatMessage
from strop.agents.parsers.base import ToolCall
from strop.agents.tool_schema import JsonObject

WITHOUT_EFFECT = (
    "temperature top_p seed frequency_penalty presence_penalty user metadata store parallel_tool_calls "
    "reasoning_effort service_tier tool_choice verbosity prediction top_logprobs safety_identifier "
    "prompt_cache_key prompt_cache_retention"
)
"""Fields that are accepted and change nothing: the run decides how its policy is sampled."""
TEXT_PARTS = ("text", "refusal")


def read_chat_call(body: bytes) -> ModelCall:
    """Return the call of a request; ApiRefusal if it asks for what is not supported."""
    fields = RequestFields.read(body)
    messages = fields.objects("messages")
    if not messages:
        raise ApiRefusal(400, "messages must be a list with at least one message.", param="messages")
    if fields.get("n") not in (None, 1):
        raise ApiRefusal(400, "n must be 1: an episode continues one answer.", param="n")
    wanted_format = fields.get("response_format")
    if wanted_format is not None and wanted_format != {"type": "text"}:
        raise ApiRefusal(
            400, "response_format can only be text: answers are sampled freely.", param="response_format"
        )
    options = fields.get("stream_options")
    max_tokens = fields.whole_number("max_completion_tokens")
    older_name = fields.whole_number("max_tokens")
    call = ModelCall(
        messages=[read_chat_message(message, place) for place, message in enumerate(messages)],
        tools=read_chat_tools(fields),
        model=fields.text("model"),
        max_tokens=max_tokens or older_name,
        stop=fields.strings("stop"),
        stream=fields.flag("stream"),
        wants_log_probs=fields.flag("logprobs"),
        reports_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )
    fields.refuse_unknown(WITHOUT_EFFECT)
    return call


def read_chat_tools(fields: RequestFields) -> list[JsonObject]:
    """Return the schemas of the tools; none where the agent wants no call now."""
    schemas = []
    for place, tool in enumerate(fields.objects("tools")):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ApiRefusal(
                400, f"tools[{place}] is of type {tool.get('type')!r}, not a function.", param="tools"
            )
        schemas.append(function_schema(function, place))
    if fields.get("tool_choice") == "none":
        return []
    return schemas


def function_schema(function: JsonObject, place: int) -> JsonObject:
    """Return a tool in the form that chat templates read."""
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ApiRefusal(400, f"tools[{place}] has no name.", param="tools")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise ApiRefusal(400, f"tools[{place}].parameters must be a JSON schema.", param="tools")
    description = function.get("description") or ""
    return {
        "type": "function",
        "function": {"name": name, "description": str(description), "parameters": parameters},
    }


def read_chat_message(message: JsonObject, place: int) -> ChatMessage:
    """Return a message in the form that chat templates read."""
    where = f"messages[{place}]"
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise ApiRefusal(400, f"{where}.role is {role!r}; use system, user, assistant or tool.", param=where)
    made: ChatMessage = {"role": role, "content": text_of(message.get("content"), where, TEXT_PARTS)}
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        made["tool_call_id"] = message["tool_call_id"]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ApiRefusal(400, f"{where}.tool_calls must be a list.", param=where)
    if role == "assistant" and calls:
        made["tool_calls"] = [read_tool_call(call, where) for call in calls]
    return made


def read_tool_call(call: object, where: str) -> JsonObject:
    """Return an earlier call as chat templates read it."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise ApiRefusal(400, f"{where}.tool_calls has a call without a function.", param=where)
    function = call["function"]
    arguments = read_arguments(function.get("arguments"))
    return template_call(str(call.get("id") or ""), str(function.get("name")), arguments)


def chat_completion(answer: ModelAnswer) -> JsonObject:
    """Return the answer as one object."""
    message: JsonObject = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [written_call(call) for call in answer.calls]
    choice = {"index": 0, "message": message, "finish_reason": finish_reason(answer), "logprobs": None}
    if answer.tokens:
        choice["logprobs"] = {"content": log_probs(answer), "refusal": None}
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": usage(answer)}


class ChatStream:
    """The answer as the lines of a stream."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._head: JsonObject = {}

    def begin(self, head: AnswerHead) -> Iterator[str]:
        self._head = _head(head, "chat.completion.chunk")
        yield self._chunk({"role": "assistant", "content": ""})

    def text(self, piece: str) -> Iterator[str]:
        yield self._chunk({"content": piece})

    def end(self, answer: ModelAnswer, rest: str) -> Iterator[str]:
        found = None
        if answer.tokens:  # also those of tool calls, which have no text
            found = {"content": log_probs(answer), "refusal": None}
        if rest or found:
            yield self._chunk({"content": rest}, log_probs=found)
        for place, tool_call in enumerate(answer.calls):
            yield self._chunk({"tool_calls": [{"index": place, **written_call(tool_call)}]})
        yield self._chunk({}, finish_reason(answer))
        if self._call.reports_usage:
            yield _event({**self._head, "choices": [], "usage": usage(answer)})
        yield "data: [DONE]\n\n"

    def error(self, refusal: ApiRefusal) -> Iterator[str]:
        yield _event(chat_error(refusal))

    def _chunk(
        self, delta: JsonObject, finish: str | None = None, log_probs: JsonObject | None = None
    ) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": log_probs}
        return _event({**self._head, "choices": [choice]})


def chat_error(refusal: ApiRefusal) -> JsonObject:
    """Return a refusal in OpenAI's format."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        429: "rate_limit_error",
        500: "server_error",
    }
    kind = kinds.get(refusal.status, "invalid_request_error")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}


def finish_reason(answer: ModelAnswer) -> str:
    if answer.calls and answer.finish == "stop":
        return "tool_calls"
    return answer.finish


def usage(answer: ModelAnswer) -> JsonObject:
    sampled = len(answer.ids)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
    }


def log_probs(answer: ModelAnswer) -> list[JsonObject]:
    """Return the log-prob of each token that has text."""
    found = []
    for token, value in zip(answer.tokens, answer.log_probs, strict=False):
        content: JsonObject = {"token": token, "logprob": value, "bytes": None, "top_logprobs": []}
        if "\ufffd" not in token:  # else it is a part of a character, whose bytes are not in its text
            content["bytes"] = list(token.encode())
        found.append(content)
    return found


def written_call(call: ToolCall) -> JsonObject:
    """Return a tool call as the API writes it: arguments are JSON in a string."""
    arguments = json.dumps(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _head(answer: AnswerHead, kind: str) -> JsonObject:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": answer.model}


def _event(content: JsonObject) -> str:
    return f"data: {json.dumps(content)}\n\n"
