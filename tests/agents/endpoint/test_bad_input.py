"""Each kind of bad input, in each API: its own error format, the episode counted as failed, and the run goes on."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from strop.agents.endpoint.processes import ConnectionOwners
from strop.agents.episode import Episode
from tests.agents.endpoint.clients import Client, run_agent
from tests.agents.stage import ScriptedEngine, prompt

ASK = [{"role": "user", "content": "?"}]
LONG = [{"role": "user", "content": "x" * 4000}]
SCHEMA = {"type": "object", "properties": {}}


@dataclasses.dataclass(frozen=True)
class Api:
    """How requests of one API look."""

    path: str
    good: dict[str, Any]
    too_long: dict[str, Any]
    tool: dict[str, Any]


CHAT = Api(
    "/v1/chat/completions",
    {"messages": ASK},
    {"messages": LONG},
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
)
RESPONSES = Api(
    "/v1/responses",
    {"input": "?"},
    {"input": "x" * 4000},
    {"type": "function", "name": "add", "parameters": SCHEMA},
)
MESSAGES = Api(
    "/v1/messages",
    {"messages": ASK, "max_tokens": 9},
    {"messages": LONG, "max_tokens": 9},
    {"name": "add", "input_schema": SCHEMA},
)


def check_error(api: Api, reply: Any, status: int, kind: str, message: str) -> None:
    content = reply.json()
    assert reply.status_code == status, reply.text
    error = content["error"]
    assert error["type"] == kind and message in error["message"], error
    if api is MESSAGES:
        assert content["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert set(content) == {"error"} and set(error) == {"message", "type", "param", "code"}


def play_two(bad: Any) -> tuple[Episode, Episode]:
    """An episode with bad input, and one without beside it."""

    async def agent(client: Client) -> None:
        await client.chat(ASK)
        if client.session.episode.prompt.index == 0:
            await bad(client)

    rows = [prompt(agent="agent", index=index) for index in range(2)]
    first, second = run_agent(agent, ScriptedEngine(["4"]), *rows)
    assert second.error is None and second.trajectory().finish == "stop", "the run goes on"
    return first, second


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES], ids=["chat", "responses", "messages"])
class TestBadInput:
    @pytest.mark.parametrize(
        ("case", "message"),
        [
            ("context", "maximum context length"),
            ("tools", "does not list 'add'"),
            ("field", "colour"),
            ("body", "not JSON"),
        ],
    )
    def test_a_bad_call_fails_its_episode(self, api: Api, case: str, message: str) -> None:
        bodies: dict[str, Any] = {
            "context": api.too_long,
            "tools": {**api.good, "tools": [api.tool]},
            "field": {**api.good, "colour": 1},
            "body": b"{",
        }

        async def bad(client: Client) -> None:
            reply = await client.post(api.path, bodies[case])
            check_error(api, reply, 400, "invalid_request_error", message)

        first, _ = play_two(bad)
        assert message in str(first.error) and first.counts["refused_calls"] == 1

    def test_a_null_is_an_absent_field(self, api: Api) -> None:
        async def agent(client: Client) -> None:
            names = (
                "functions",
                "logit_bias",
                "audio",
                "stop",
                "stop_sequences",
                "tools",
                "tool_choice",
                "n",
                "stream",
            )
            reply = await client.post(api.path, {**api.good, **dict.fromkeys(names)})
            assert reply.status_code == 200, reply.text

        [episode] = run_agent(agent, ScriptedEngine(["4"]))
        assert episode.error is None

    def test_a_wrong_key_reaches_no_episode(self, api: Api) -> None:
        async def bad(client: Client) -> None:
            reply = await client.post(api.path, api.good, key="strop-wrong")
            check_error(api, reply, 401, "authentication_error", "Incorrect API key")

        first, second = play_two(bad)
        assert first.error is None and (first.counts + second.counts)["wrong_keys"] == 1

    def test_a_closed_episode_takes_no_calls(self, api: Api) -> None:
        keys: list[str] = []

        async def agent(client: Client) -> None:
            await client.chat(ASK)
            if client.session.episode.prompt.index:
                keys.append(client.session.key)
                return
            while not keys or (await client.get("/v1/models", keys[0])).status_code == 200:
                await asyncio.sleep(0.01)
            reply = await client.post(api.path, api.good, key=keys[0])
            check_error(api, reply, 401, "authentication_error", "has ended")

        rows = [prompt(agent="agent", index=index) for index in range(2)]
        first, second = run_agent(agent, ScriptedEngine(["4"]), *rows)
        assert first.error is None and second.error is None and second.counts["calls"] == 1
        assert first.counts["calls_after_end"] >= 1

    def test_the_key_of_another_program_is_refused(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ConnectionOwners, "mark", lambda self, client, server, expected: "another")

        async def bad(client: Client) -> None:
            client.session.known_ports.clear()
            client.session.program_mark = "own"
            reply = await client.post(api.path, api.good)
            check_error(api, reply, 403, "permission_error", "another program")

        first, _ = play_two(bad)
        assert first.counts["shared_keys"] == 1 and "another program" in str(first.error)

    def test_too_many_calls_are_refused(self, api: Api) -> None:
        async def agent(client: Client) -> None:
            await client.chat(ASK)
            reply = await client.post(api.path, api.good)
            check_error(api, reply, 429, "rate_limit_error", "Too many calls")

        [episode] = run_agent(agent, ScriptedEngine(["4"]), max_calls=1)
        assert "max_calls=1" in str(episode.error)
