"""A program as an agent: started for every episode, with the address and the key of the endpoint.

The program gets its task as an argument or as a file, talks to the model as to any API, and ends. Whatever it
does, it ends with its episode: its process group and all processes with its mark are killed when the episode
is over.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from strop.agents.endpoint.processes import MARK, kill_marked
from strop.agents.endpoint.session import EndpointSession
from strop.agents.episode import Episode, EpisodeError
from strop.config.policies import players_of
from strop.config.schema.rollout import AgentConfig

PROGRAM_AGENT = "program_agent"
SHOWN_OUTPUT = 1000
"""Bytes of a program's output that an error shows."""
PIECE = 2**16
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ProgramAgent:
    """The loop `program_agent`: rollout.agent.command."""

    def __init__(self, settings: AgentConfig) -> None:
        self.settings = settings
        self.words = command_words(settings)
        self._places = asyncio.Semaphore(settings.max_processes)

    async def run(self, episode: Episode) -> None:
        endpoint = episode.context.endpoint
        assert endpoint is not None, "rollout.agent.command starts an endpoint"
        async with self._places:
            with tempfile.TemporaryDirectory(prefix="strop-episode-") as folder:
                async with endpoint.session(episode, players_of(self.settings)) as session:
                    assert isinstance(session, EndpointSession)
                    code = await self._run_program(episode, session, endpoint.address, Path(folder))
                    session.end()
                    session.raise_failure()
                    self._reward(episode, session, code, Path(folder))

    async def _run_program(
        self, episode: Episode, session: EndpointSession, address: str, folder: Path
    ) -> int | None:
        """Run the program to its end; its exit status. EpisodeError if it fails."""
        task_file = folder / "task.json"
        row = {"messages": episode.prompt.messages, "extra_info": episode.prompt.extra_info}
        task_file.write_text(json.dumps({"index": episode.prompt.index, **row}, default=str))
        values = {"{task}": task_of(episode), "{task_file}": str(task_file)}
        words = [_filled(word, values) for word in self.words]
        environment = {**os.environ, **endpoint_environment(address, session.key)}
        if session.others:
            environment["STROP_API_KEYS"] = json.dumps(session.keys())
        environment["STROP_TASK_FILE"] = str(task_file)
        environment["STROP_REWARD_FILE"] = str(folder / "reward.json")
        environment[MARK] = session.mark_program()
        async with _started(words, environment) as (process, output):
            ended = asyncio.ensure_future(process.wait())
            flooded = asyncio.ensure_future(session.flooded.wait())
            limit = self.settings.timeout
            try:
                first = asyncio.FIRST_COMPLETED
                await episode.waiting(asyncio.wait((ended, flooded), timeout=limit, return_when=first))
            finally:
                flooded.cancel()
                if not ended.done():
                    ended.cancel()
            if session.flooded.is_set():
                return None
            if not ended.done():
                episode.counts["program_timeouts"] += 1
                raise EpisodeError(
                    f"the program did not end within {limit:g} seconds (rollout.agent.timeout)."
                    f"{output.shown()}"
                )
            code = ended.result()
            if code and self.settings.reward != "exit" and not episode.stopped and session.failure is None:
                episode.counts["program_crashes"] += 1
                raise EpisodeError(f"the program ended with status {code}.{output.shown()}")
            return code

    def _reward(self, episode: Episode, session: EndpointSession, code: int | None, folder: Path) -> None:
        """Set the score, unless the reward function of the run does."""
        if self.settings.reward == "exit":
            episode.score = float(code == 0)
        elif self.settings.reward == "file":
            set_rewards(session, read_rewards(folder / "reward.json"), "$STROP_REWARD_FILE")


def command_words(settings: AgentConfig) -> list[str]:
    """Return rollout.agent.command as words; ValueError if there is no such program."""
    given = f"rollout.agent.command={settings.command!r}"
    try:
        words = shlex.split(settings.command or "")
    except ValueError as error:
        raise ValueError(f"{given} cannot be read: {error}.") from error
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        raise ValueError(
            f"{given}: there is no program {program!r}. Give its path, or add its folder to PATH."
        )
    return words


def task_of(episode: Episode) -> str:
    """Return the text of the last message of the user."""
    for message in reversed(episode.prompt.messages):
        if message["role"] == "user" and isinstance(message["content"], str):
            return message["content"]
    raise EpisodeError("the row has no message of the user in text, which is the task of the program.")


def endpoint_environment(address: str, key: str) -> dict[str, str]:
    """Return the variables by which clients of the APIs find the endpoint."""
    direct = _without_proxy(address)
    return {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": key,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _without_proxy(address: str) -> str:
    """Return the hosts that a program reaches without a proxy: those of the environment, and the endpoint."""
    hosts: dict[str, None] = {}
    for name in ("no_proxy", "NO_PROXY"):
        hosts.update(dict.fromkeys(host.strip() for host in os.environ.get(name, "").split(",")))
    hosts.pop("", None)
    if "*" in hosts:  # it means all hosts only where it stands alone
        return "*"
    hosts.update(dict.fromkeys([*LOOPBACK, str(urlsplit(address).hostname)]))
    return ",".join(hosts)


def read_rewards(file: Path) -> object:
    """Return what a program wrote."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError as error:
        raise EpisodeError("the program wrote no reward into $STROP_REWARD_FILE.") from error
    except (ValueError, RecursionError) as error:
        raise EpisodeError(f"$STROP_REWARD_FILE is not JSON: {error}.") from error


def set_rewards(session: EndpointSession, content: object, where: str) -> None:
    """Set the rewards that a program gave: a number, {"score": a number, "turns": [a number for each call]},
    or {"scores": {"a player": a number}}."""
    turns: object = []
    if isinstance(content, dict) and "scores" in content:
        scores = content["scores"]
        if not isinstance(scores, dict) or not all(map(_is_reward, scores.values())):
            raise EpisodeError(f'{where} must hold a number for each player under "scores".')
        session.set_scores(scores)
        return
    if isinstance(content, dict):
        turns = content.get("turns", [])
        content = content.get("score")
    if not isinstance(turns, list) or not all(map(_is_reward, [content, *turns])):
        raise EpisodeError(f'{where} must hold a number, or {{"score": a number, "turns": [numbers]}}.')
    if session.others:
        raise EpisodeError(f'{where} must hold {{"scores": ...}}: the players are {list(session.keys())}.')
    session.set_rewards(float(cast(float, content)), turns)


def _is_reward(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        if name in word:
            return word.replace(name, value)
    return word


class ProgramOutput:
    """The end of what a program prints. It is read all the time, so that the program is never blocked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._tail = b""
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        try:
            piece = os.read(self._descriptor, PIECE)
        except BlockingIOError:
            return
        self._tail = (self._tail + piece)[-SHOWN_OUTPUT:]
        if not piece:
            asyncio.get_running_loop().remove_reader(self._descriptor)

    def shown(self) -> str:
        """Return the end of the output, for an error message."""
        self._read()
        text = self._tail.decode("utf-8", "replace").strip()
        return f" Its output ends with: {text}" if text else ""

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)


@asynccontextmanager
async def _started(
    words: list[str], environment: Mapping[str, str]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, ProgramOutput]]:
    """Start a program as the leader of a process group, which is killed at the end."""
    reading, writing = os.pipe()
    output = ProgramOutput(reading)
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=dict(environment),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise EpisodeError(f"the program {words[0]} cannot be started: {error}.") from error
        finally:
            os.close(writing)
        try:
            yield process, output
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            kill_marked(environment[MARK])
            await process.wait()
    finally:
        output.close()
