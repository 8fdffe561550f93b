"""A program that runs for the whole run and plays many episodes at a time (rollout.agent.service).

It reads a line of JSON for each episode from its standard input:

    {"id": 7, "task": "...", "index": 3, "messages": [...], "extra_info": {...},
     "base_url": "http://127.0.0.1:4711/v1", "api_key": "strop-..."}

and writes a line when the episode is over: {"id": 7}, or {"id": 7, "error": "..."}, or, with
rollout.agent.reward=file, {"id": 7, "score": 1.0, "turns": [0.0, 0.5]}. What it writes to its standard error
is shown when it fails. A program that ends is started again for the next episode.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from contextlib import suppress
from typing import cast

from strop.agents.endpoint.processes import MARK, kill_marked, new_mark
from strop.agents.endpoint.program import (
    ProgramOutput,
    command_words,
    endpoint_environment,
    set_rewards,
    task_of,
)
from strop.agents.endpoint.session import EndpointSession
from strop.agents.episode import Episode, EpisodeEndpoint, EpisodeError
from strop.agents.tool_schema import JsonObject
from strop.config.policies import players_of
from strop.config.schema.rollout import AgentConfig

LONGEST_LINE = 2**20


class ServiceEnded(EpisodeError):
    """The program ended, or wrote what is no answer, while an episode waited for it."""


class AgentService:
    """The running program."""

    def __init__(self, process: asyncio.subprocess.Process, output: ProgramOutput, mark: str) -> None:
        """`mark`: in the environment of the program and its children."""
        self.process = process
        self._mark = mark
        self.output = output
        self._waiting: dict[int, asyncio.Future[JsonObject]] = {}
        self._listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def start(cls, words: list[str], address: str) -> AgentService:
        """Start the program. Episodes have keys of their own, so its environment has none."""
        reading, writing = os.pipe()
        mark = new_mark()
        environment = {**os.environ, **endpoint_environment(address, "given with each episode"), MARK: mark}
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=writing,
                env=environment,
                limit=LONGEST_LINE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            os.close(reading)
            raise EpisodeError(f"the program {words[0]} cannot be started: {error}.") from error
        finally:
            os.close(writing)
        return cls(process, ProgramOutput(reading), mark)

    @property
    def ended(self) -> bool:
        return self._listening.done()

    async def play(self, number: int, episode: JsonObject) -> JsonObject:
        """Send an episode, and return the answer to it."""
        if self.ended:
            raise ServiceEnded(f"the program ended.{self.output.shown()}")
        future: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{json.dumps({'id': number, **episode}, default=str)}\n".encode())
            return await future
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        """Kill the program and its children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        kill_marked(self._mark)
        await self._listening
        await self.process.wait()
        self.output.close()

    async def _listen(self) -> None:
        """Read answers until the program ends; then fail the episodes that wait."""
        assert self.process.stdout is not None
        reason = "the program ended"
        try:
            while line := await self.process.stdout.readline():
                self._answer(line)
        except (ValueError, RecursionError) as error:
            reason = f"the program wrote a line that is no answer: {error}"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ServiceEnded(f"{reason}.{self.output.shown()}"))

    def _answer(self, line: bytes) -> None:
        """Give an answer to its episode; ValueError if it is none. Late answers are ignored."""
        answer = json.loads(line)
        if not isinstance(answer, dict) or not isinstance(answer.get("id"), int):
            raise ValueError(f"{line[:200]!r} is not an object with the id of an episode")
        future = self._waiting.get(answer["id"])
        if future is not None and not future.done():
            future.set_result(answer)


class ServiceAgent:
    """The loop `program_agent` with rollout.agent.service."""

    def __init__(self, settings: AgentConfig) -> None:
        self.settings = settings
        self.words = command_words(settings)
        self._service: AgentService | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()

    async def run(self, episode: Episode) -> None:
        endpoint = episode.context.endpoint
        assert endpoint is not None, "rollout.agent.command starts an endpoint"
        async with endpoint.session(episode, players_of(self.settings)) as opened:
            session = cast(EndpointSession, opened)
            try:
                answer = await self._play(episode, session, endpoint)
            except ServiceEnded:
                if session.requests:
                    raise
                answer = await self._play(episode, session, endpoint)  # another episode had ended it
            session.end()
            session.raise_failure()
            self._reward(episode, session, answer)

    async def _running(self, endpoint: EpisodeEndpoint) -> AgentService:
        async with self._starting:
            if self._service is not None and self._service.ended:
                await self._service.close()
                self._service = None
            if self._service is None:
                self._service = await AgentService.start(self.words, endpoint.address)
                endpoint.when_closing(self._close)
            return self._service

    async def _close(self) -> None:
        if self._service is not None:
            await self._service.close()
            self._service = None

    async def _play(
        self, episode: Episode, session: EndpointSession, endpoint: EpisodeEndpoint
    ) -> JsonObject:
        """Let the program play the episode. EpisodeError if it fails."""
        service = await self._running(endpoint)
        row = {"index": episode.prompt.index, "extra_info": episode.prompt.extra_info}
        task = {"task": task_of(episode), "messages": episode.prompt.messages, **row}
        access: JsonObject = {"base_url": f"{endpoint.address}/v1", "api_key": session.key}
        if session.others:
            access["api_keys"] = session.keys()
        playing = asyncio.ensure_future(service.play(next(self._numbers), {**task, **access}))
        flooded = asyncio.ensure_future(session.flooded.wait())
        limit = self.settings.timeout
        try:
            first = asyncio.FIRST_COMPLETED
            await episode.waiting(asyncio.wait((playing, flooded), timeout=limit, return_when=first))
            if session.flooded.is_set():
                return {}
            if not playing.done():
                episode.counts["program_timeouts"] += 1
                raise EpisodeError(f"no answer within {limit:g} seconds (rollout.agent.timeout).")
        finally:
            flooded.cancel()
            playing.cancel()
        answer = playing.result()
        failed = answer.get("error") is not None and self.settings.reward != "exit"
        if failed and not episode.stopped and session.failure is None:
            episode.counts["program_crashes"] += 1
            raise EpisodeError(f"the program reports: {answer['error']}")
        return answer

    def _reward(self, episode: Episode, session: EndpointSession, answer: JsonObject) -> None:
        if self.settings.reward == "exit":
            episode.score = float(answer.get("error") is None)
        elif self.settings.reward == "file":
            set_rewards(session, answer, "the answer of the program")
