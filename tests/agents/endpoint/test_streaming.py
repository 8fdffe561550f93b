"""Streams begin while the engine samples: every client reads the first text before the last token exists."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from strop.agents.endpoint.streaming import settled
from strop.rollout.base import Completion, Request, Sampling
from tests.agents.endpoint.clients import Client, run_agent
from tests.agents.endpoint.test_server import ADD, WITH_TOOLS
from tests.agents.stage import ScriptedEngine, text, tokenizer_of

ASK = [{"role": "user", "content": "?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "responses": {"input": "?"},
    "messages": {"messages": ASK, "max_tokens": 200},
}


class Reporting(ScriptedEngine):
    """Reports the first tokens from another thread, and the rest when the client has read some text."""

    def __init__(self, script: list[str], tokenizer: Any, first: int) -> None:
        super().__init__(script, tokenizer)
        self.first = first
        self.seen = asyncio.Event()
        self.broken = False

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        [completion] = await super().agenerate(request, sampling)
        if request.on_tokens is not None:
            begin = completion.ids[: self.first], completion.log_probs[: self.first]
            await asyncio.to_thread(request.on_tokens, 0, *begin)
            await asyncio.wait_for(self.seen.wait(), 30)
            await asyncio.to_thread(request.on_tokens, 0, completion.ids[self.first :], [])
        if self.broken:
            return [Completion([], [], "error", 0, "out of memory")]
        return [completion]


def texts_of(event: dict[str, Any]) -> str:
    """The text in one event of any API."""
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text", ""))
    return ""


async def read_stream(client: Client, engine: Reporting, path: str, **more: Any) -> list[dict[str, Any]]:
    body = {"model": "m", "stream": True, **BODIES[path], **more}
    headers = {"Authorization": f"Bearer {client.session.key}"}
    found = []
    async with client.http.stream("POST", f"/v1/{path}", json=body, headers=headers, timeout=60) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line.removeprefix("data: ")))
                if texts_of(found[-1]):
                    engine.seen.set()
    return found


@pytest.mark.parametrize("path", list(BODIES))
def test_text_is_sent_while_the_engine_samples(path: str) -> None:
    engine = Reporting(["four and five"], tokenizer_of(WITH_TOOLS), 6)
    found: list[dict[str, Any]] = []

    async def agent(client: Client) -> None:
        found.extend(await read_stream(client, engine, path))

    [episode] = run_agent(agent, engine, tokenizer=engine.tokenizer)
    assert episode.error is None
    pieces = [texts_of(event) for event in found if texts_of(event)]
    assert pieces[0] == "four a" and "".join(pieces) == "four and five"
    assert text(episode.trajectory().response).startswith("four and five")


@pytest.mark.parametrize("path", list(BODIES))
def test_a_tool_call_comes_at_the_end(path: str) -> None:
    tokenizer = tokenizer_of(WITH_TOOLS)
    engine = Reporting([f"So:{CALL}"], tokenizer, 20)
    function = ADD["function"]
    tools: dict[str, list[Any]] = {
        "chat/completions": [ADD],
        "responses": [{"type": "function", **function}],  # type: ignore[dict-item]
        "messages": [{"name": "add", "input_schema": function["parameters"]}],  # type: ignore[index]
    }
    found: list[dict[str, Any]] = []

    async def agent(client: Client) -> None:
        found.extend(await read_stream(client, engine, path, tools=tools[path]))

    [episode] = run_agent(agent, engine, tokenizer=tokenizer, response_length=800)
    assert episode.error is None
    assert [texts_of(event) for event in found if texts_of(event)] == ["So:"]
    names = json.dumps(found)
    assert names.count('"add"') >= 1 and "tool_call>" not in names


@pytest.mark.parametrize("path", list(BODIES))
def test_an_answer_that_breaks_off_ends_with_an_error(path: str) -> None:
    engine = Reporting(["four and five"], tokenizer_of(WITH_TOOLS), 6)
    engine.broken = True
    found: list[dict[str, Any]] = []

    async def agent(client: Client) -> None:
        found.extend(await read_stream(client, engine, path))

    [episode] = run_agent(agent, engine, tokenizer=engine.tokenizer)
    assert "out of memory" in str(episode.error) and "out of memory" in json.dumps(found[-1])
    assert "error" in found[-1] or found[-1]["type"] == "error"


class Failing(Reporting):
    """Raises when the first tokens have been read; answers every other call."""

    async def agenerate(self, request: Request, sampling: Sampling) -> list[Completion]:
        found = await super().agenerate(request, sampling)
        if len(self.requests) == 1:
            raise RuntimeError("device-side assert")
        return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
def test_an_engine_that_raises_fails_the_episode_also_if_the_agent_asks_again(
    path: str, stream: bool
) -> None:
    engine = Failing(["four and five"], tokenizer_of(WITH_TOOLS), 6)
    replies: list[str] = []

    async def agent(client: Client) -> None:
        if stream:
            replies.append(json.dumps((await read_stream(client, engine, path))[-1]))
        else:
            reply = await client.post(f"/v1/{path}", {"model": "m", **BODIES[path]})
            assert reply.status_code == 500 and reply.headers["content-type"] == "application/json"
            replies.append(reply.text)
        reply = await client.post(f"/v1/{path}", {"model": "m", **BODIES[path]})
        assert reply.status_code == 200

    [episode] = run_agent(agent, engine, tokenizer=engine.tokenizer)
    assert "device-side assert" in replies[0] and "error" in replies[0]
    assert "device-side assert" in str(episode.error) and episode.trajectory().finish == "error"


@pytest.mark.parametrize(
    ("said", "has_tools", "sent"),
    [
        ("one tw", False, "one tw"),
        ("one ", False, "one"),
        ("caf\ufffd", False, "caf"),
        ("a < b", False, "a < b"),
        ("a < b", True, "a"),
        ('Now {"name"', True, "Now"),
        ("[TOOL_CALLS]", True, ""),
        ("\nNow", True, ""),
    ],
)
def test_what_later_tokens_may_change_is_held_back(said: str, has_tools: bool, sent: str) -> None:
    assert settled(said, has_tools) == sent
