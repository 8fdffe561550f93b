"""Agents of the tests: coroutines that talk to the endpoint over real sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx

from strop.agents.endpoint.server import EndpointServer
from strop.agents.endpoint.session import EndpointSession
from strop.agents.episode import Episode
from strop.agents.loops import AgentLoops
from strop.agents.runner import EpisodeRequest, EpisodeRunner
from strop.types import Prompt
from tests.agents.stage import SAMPLING, episode_context, prompt

Agent = Callable[["Client"], Awaitable[object]]


class Client:
    """The HTTP client of one agent."""

    def __init__(self, http: httpx.AsyncClient, session: EndpointSession) -> None:
        self.http = http
        self.session = session

    async def post(self, path: str, body: Any, key: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key or self.session.key}"}
        if isinstance(body, bytes):
            return await self.http.post(path, content=body, headers=headers)
        return await self.http.post(path, json=body, headers=headers)

    async def get(self, path: str, key: str | None = None) -> httpx.Response:
        return await self.http.get(path, headers={"Authorization": f"Bearer {key or self.session.key}"})

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The message of the answer."""
        reply = await self.post("/v1/chat/completions", {"model": "m", "messages": messages, **fields})
        assert reply.status_code == 200, reply.text
        message: dict[str, Any] = reply.json()["choices"][0]["message"]
        return message


def run_agent(
    agent: Agent,
    engine: Any,
    *rows: Prompt,
    tool_format: str = "hermes",
    max_calls: int = 100,
    adapters: dict[str, str | None] | None = None,
    **limits: Any,
) -> list[Episode]:
    """Run an episode per row whose agent is a coroutine."""
    server = EndpointServer(tool_format, host="127.0.0.1", max_calls=max_calls, adapters=adapters)
    context = replace(episode_context(engine, **limits), endpoint=server)

    async def loop(episode: Episode) -> None:
        async with server.session(episode) as session:
            async with httpx.AsyncClient(base_url=server.address, trust_env=False, timeout=120) as http:
                await agent(Client(http, session))
            session.raise_failure()

    loops = AgentLoops("agent", {"agent": (loop, {})})
    given = rows or (prompt(agent="agent"),)
    runner = EpisodeRunner(context, loops, max_concurrency=1024)
    try:
        requests = [EpisodeRequest(row, SAMPLING, (1, row.index), place) for place, row in enumerate(given)]
        return runner.run(requests, all_may_fail=True)
    finally:
        runner.close()
