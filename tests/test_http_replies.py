"""Servers that never stop sending: each client ends at the documented limit, or at its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strop import http_replies
from strop.config.schema.reward import JudgeConfig
from strop.http_replies import ReplyTooLarge, limit_replies
from strop.rewards.http import get_json, post_json
from strop.rewards.judge import ChatCompletionsClient
from strop.rewards.sandbox.limits import SandboxError, SandboxLimits
from strop.rewards.sandbox.remote import run_remote_tests
from strop.rollout.external_host import JsonClient, ServerRefused

ROOT = Path(__file__).parent.parent / "strop"
LIMIT = 1 << 20
PIECE = b" " * 65536
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def endless(connection: socket.socket) -> Iterator[bytes]:
    yield OK + b"\r\n"
    while True:
        yield PIECE


def chunked(connection: socket.socket) -> Iterator[bytes]:
    yield OK + b"Transfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"%x\r\n%s\r\n" % (len(PIECE), PIECE)


def huge_chunk(connection: socket.socket) -> Iterator[bytes]:
    yield OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffff\r\n"
    while True:
        yield PIECE


def announced(connection: socket.socket) -> Iterator[bytes]:
    yield OK + b"Content-Length: 1000000000000\r\n\r\n"
    while True:
        yield PIECE


def failing(connection: socket.socket) -> Iterator[bytes]:
    yield b"HTTP/1.1 404 Not Found\r\n\r\n"
    while True:
        yield PIECE


def interim(connection: socket.socket) -> Iterator[bytes]:
    while True:
        yield b"HTTP/1.1 100 Continue\r\n\r\n" * 1000


def trickle(connection: socket.socket) -> Iterator[bytes]:
    yield OK + b"\r\n"
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wait = threading.Event()
    while True:
        wait.wait(0.02)  # faster than the timeout of the client, which begins anew with each byte
        yield b" "


def bomb(connection: socket.socket) -> Iterator[bytes]:
    body = gzip.compress(bytes(4 * LIMIT))
    yield OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


Flood = Callable[[socket.socket], Iterator[bytes]]


class Server:
    """Answers every connection with what a flood yields, until the client hangs up."""

    def __init__(self, flood: Flood) -> None:
        self.flood = flood
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listening.accept()
                self.connections += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            for piece in self.flood(connection):
                connection.sendall(piece)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Flood], Server]]:
    monkeypatch.setattr(http_replies, "MAX_REPLY_BYTES", LIMIT)
    started: list[Server] = []

    def start(flood: Flood) -> Server:
        started.append(Server(flood))
        return started[-1]

    yield start
    for server in started:
        server.listening.shutdown(socket.SHUT_RDWR)  # closing alone leaves its thread in `accept`
        server.listening.close()


@pytest.mark.parametrize("flood", [endless, chunked, huge_chunk, announced, interim])
def test_a_reply_without_end_is_an_error_at_the_limit(serve: Any, flood: Flood) -> None:
    server = serve(flood)
    with pytest.raises(ReplyTooLarge, match=r"reward server .* more than 1,048,576 bytes, the limit"):
        post_json(lambda: server.url, {}, what="reward server", timeout=30.0)
    assert server.connections == 1, "the same request would end in the same way"


def test_a_reply_that_breaks_off_is_no_reply(serve: Any) -> None:
    def cut(connection: socket.socket) -> Iterator[bytes]:
        yield OK + b"Content-Length: 10\r\n\r\n123"

    with pytest.raises(http.client.IncompleteRead):
        get_json(serve(cut).url, {}, timeout=30.0)


def test_the_text_of_an_error_is_limited_too(serve: Any) -> None:
    with pytest.raises(ConnectionError, match="404"):
        post_json(lambda: serve(failing).url, {}, what="reward server", timeout=30.0)


def test_a_reply_that_trickles_ends_at_the_deadline(serve: Any) -> None:
    with pytest.raises(TimeoutError, match=r"time of the request is over|timed out"):
        post_json(lambda: serve(trickle).url, {}, what="judge", timeout=0.4, pause=0.3)


def test_models_of_a_judge_and_outcomes_of_a_sandbox_server_are_limited(serve: Any) -> None:
    url = serve(endless).url
    with pytest.raises(ReplyTooLarge):
        get_json(url, {}, timeout=100.0)
    with pytest.raises(ValueError, match=r"does not say which models it has .ReplyTooLarge"):
        ChatCompletionsClient(JudgeConfig(url=url), timeout=100.0)
    with pytest.raises(SandboxError, match="more than 1,048,576 bytes"):
        run_remote_tests("1", [{"stdin": ""}], SandboxLimits(seconds=60.0), url=url, max_concurrent=1)


@pytest.mark.parametrize(
    ("flood", "why"),
    [
        (endless, "more than 1,048,576 bytes"),
        (chunked, "more than 1,048,576 bytes"),
        (failing, "more than 1,048,576 bytes"),
        (bomb, r"compressed .gzip., which was not asked for"),
    ],
)
def test_replies_of_an_engine_are_limited(serve: Any, flood: Flood, why: str) -> None:
    client = JsonClient("sglang", serve(flood).url)
    try:
        with pytest.raises(ServerRefused, match=why):
            client.request("POST", "/generate", {})
    finally:
        client.close()


class IdleServer(threading.Thread):
    """Answers the requests of a connection, and closes it when one comes that crosses the end of its idle
    time."""

    idle_seconds = 3.0  # less than the 5 seconds of uvicorn, in which vLLM and SGLang run

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.connections = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):  # it is closed by the test
            while True:
                connection, _ = self._socket.accept()
                self.connections += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        idle_since = time.monotonic()
        with connection, connection.makefile("rb") as received:
            while line := received.readline():
                if time.monotonic() - idle_since > self.idle_seconds:
                    return
                if line == b"\r\n":
                    connection.sendall(OK + b"Content-Length: 2\r\n\r\n{}")
                    idle_since = time.monotonic()

    def close(self) -> None:
        self._socket.close()


def test_a_connection_is_not_used_after_it_was_idle_for_long() -> None:
    server = IdleServer()
    client = JsonClient("vllm", server.url)
    try:
        for pause in (0.0, 0.1, server.idle_seconds + 0.2):
            time.sleep(pause)
            assert client.request("GET", "/health") == {}
        assert server.connections == 2
    finally:
        client.close()
        server.close()


def test_event_streams_have_no_limit_in_all(serve: Any) -> None:
    """An MCP server keeps one open for the whole run; its client limits each message."""
    import httpx

    def events(connection: socket.socket) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        for _ in range(40):
            yield PIECE

    async def size() -> int:
        async with httpx.AsyncClient() as client:
            limit_replies(httpx, client)
            return len((await client.get(serve(events).url)).content)

    assert asyncio.run(size()) == 40 * len(PIECE)


def test_every_http_client_reads_through_the_limits() -> None:
    """urlopen stands in no other file, and a file that makes a client of httpx limits it."""
    opens = re.compile(r"\b(urlopen|build_opener|HTTPS?Connection)\(")
    makes_client = re.compile(r"\b(AsyncClient|create_mcp_http_client|Client)\(")
    wrong = []
    for file in sorted(ROOT.rglob("*.py")):
        source = file.read_text()
        if file.name == "http_replies.py":
            continue
        if opens.search(source):
            wrong.append(f"{file}: read the reply with strop.http_replies.read_reply")
        if "http" in source and makes_client.search(source) and "limit_replies(" not in source:
            wrong.append(f"{file}: call strop.http_replies.limit_replies on the client")
    assert not wrong, "\n".join(wrong)
