"""Anthropic's messages and OpenAI's responses: the same conversation through each API gives the same tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.agents.endpoint.clients import Client, run_agent
from tests.agents.endpoint.test_server import WITH_TOOLS
from tests.agents.stage import ScriptedEngine, text, tokenizer_of

CALL = '<tool_call>\n{"name":  "add", "arguments": {"a": 2}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is also in its data."""
    found = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def by_chat(client: Client) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2?"},
    ]
    answer = await client.chat(messages, tools=tools)
    call_id = answer["tool_calls"][0]["id"]
    messages += [answer, {"role": "tool", "tool_call_id": call_id, "content": "four"}]
    await client.chat(messages, tools=tools)


async def by_messages(client: Client, stream: bool = False) -> None:
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 100,
        "system": "Add.",
        "tools": tools,
        "stream": stream,
    }
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "2?"}]}]
    reply = await client.post("/v1/messages", {**body, "messages": messages})
    assert reply.status_code == 200, reply.text
    if stream:
        kinds = [event["type"] for event in events(reply)]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        blocks = [event for event in events(reply) if event["type"] == "content_block_start"]
        deltas = [event["delta"] for event in events(reply) if event["type"] == "content_block_delta"]
        content = [dict(block["content_block"]) for block in blocks]
        content[0]["text"] = deltas[0]["text"]
        content[1]["input"] = json.loads(deltas[1]["partial_json"])
        assert events(reply)[-2]["delta"]["stop_reason"] == "tool_use"
    else:
        whole = reply.json()
        content = whole["content"]
        assert whole["stop_reason"] == "tool_use" and whole["usage"]["output_tokens"] > 10
    assert content[0] == {"type": "text", "text": "So:"} and content[1]["input"] == {"a": 2}
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "four"}
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    reply = await client.post("/v1/messages", {**body, "messages": messages, "stream": False})
    assert reply.json()["content"] == [{"type": "text", "text": "4"}]
    assert reply.json()["stop_reason"] == "end_turn" and reply.json()["role"] == "assistant"


async def by_messages_stream(client: Client) -> None:
    await by_messages(client, stream=True)


async def by_responses(client: Client, stream: bool = False) -> None:
    tools = [{"type": "function", **FUNCTION, "strict": True}]
    body: dict[str, Any] = {"model": "m", "instructions": "Add.", "tools": tools, "stream": stream}
    items: list[dict[str, Any]] = [{"role": "user", "content": "2?"}]
    reply = await client.post("/v1/responses", {**body, "input": items})
    assert reply.status_code == 200, reply.text
    whole = reply.json() if not stream else events(reply)[-1]["response"]
    if stream:
        assert [event["sequence_number"] for event in events(reply)] == list(range(len(events(reply))))
        done = [e["item"] for e in events(reply) if e["type"] == "response.output_item.done"]
        assert done == whole["output"]
    assert whole["status"] == "completed" and [item["type"] for item in whole["output"]] == [
        "message",
        "function_call",
    ]
    items += whole["output"]
    items.append({"type": "function_call_output", "call_id": whole["output"][1]["call_id"], "output": "four"})
    reply = await client.post("/v1/responses", {**body, "input": items, "stream": False})
    [message] = reply.json()["output"]
    assert message["content"][0]["text"] == "4"


async def by_responses_stream(client: Client) -> None:
    await by_responses(client, stream=True)


@pytest.mark.parametrize("agent", [by_messages, by_messages_stream, by_responses, by_responses_stream])
def test_every_api_records_the_same_tokens(agent: Any) -> None:
    tokenizer = tokenizer_of(WITH_TOOLS)
    samples = []
    for one in (by_chat, agent):
        engine = ScriptedEngine([f"So:{CALL}", "4"], tokenizer)
        [episode] = run_agent(one, engine, tokenizer=tokenizer, response_length=800)
        assert episode.error is None
        samples.append(episode.trajectory())
    assert samples[0].branches == samples[1].branches == []
    assert samples[0].prompt.ids == samples[1].prompt.ids and samples[0].response == samples[1].response
    assert text(samples[1].response).startswith(f"So:{CALL}<|im_end|>\n<|im_start|>tool\nfour")


@pytest.mark.parametrize("stream", [False, True])
def test_messages_say_which_stop_sequence_ended_them(stream: bool) -> None:
    async def agent(client: Client) -> None:
        body = {
            "messages": [ASK],
            "max_tokens": 100,
            "stop_sequences": ["Human:", "Observation:"],
            "stream": stream,
        }
        found = []
        for _ in range(2):
            reply = await client.post("/v1/messages", body)
            ending = events(reply)[-2]["delta"] if stream else reply.json()
            found.append((ending["stop_reason"], ending["stop_sequence"]))
        assert found == [("stop_sequence", "Observation:"), ("end_turn", None)]

    [episode] = run_agent(agent, ScriptedEngine(["So: Observation: Human:", "four"]))
    assert episode.error is None


ASK = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("messages", {"messages": [ASK]}, "max_tokens: Field required"),
        ("messages", {"messages": [], "max_tokens": 9}, "at least one"),
        (
            "messages",
            {"messages": [{"role": "system", "content": "x"}], "max_tokens": 9},
            "user or assistant",
        ),
        ("messages", {"messages": [ASK], "max_tokens": 9, "colour": 1}, "colour"),
        ("messages", {"messages": [ASK], "max_tokens": 9, "tools": [{"type": "bash_1"}]}, "bash_1"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 9},
            "image",
        ),
        ("responses", {"input": []}, "at least one"),
        ("responses", {"input": "?", "previous_response_id": "x"}, "whole input"),
        ("responses", {"input": "?", "text": {"format": {"type": "json_schema"}}}, "only be text"),
        ("responses", {"input": "?", "text": {"format": ["text"]}}, "only be text"),
        ("responses", {"input": [{"type": "reasoning"}]}, "reasoning"),
        ("responses", {"input": "?", "tools": [{"type": "web_search"}]}, "web_search"),
        ("responses", {"input": "?", "colour": 1}, "colour"),
        ("embeddings", {"input": "?"}, "Unknown request URL"),
    ],
)
def test_refusals_have_the_format_of_their_api(path: str, body: dict[str, Any], message: str) -> None:
    async def agent(client: Client) -> None:
        reply = await client.post(f"/v1/{path}", body)
        assert reply.status_code in (400, 404)
        error = reply.json()["error"]
        assert message in error["message"], error
        if path == "messages":
            assert reply.json()["type"] == "error" and set(error) == {"type", "message"}
        else:
            assert set(error) == {"message", "type", "param", "code"}

    [episode] = run_agent(agent, ScriptedEngine(["4"]))
    assert "was refused" in str(episode.error)
