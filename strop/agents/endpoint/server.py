"""The HTTP server of the endpoint. It runs on the event loop of the episodes, in the trainer's process.

A key belongs to one episode. A request with no key, a wrong one or that of an ended episode is refused and
counted; it reaches no episode.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.agents.endpoint.calls import ApiRefusal, ModelAnswer, ModelCall
from strop.agents.endpoint.chat_completions import ChatStream, chat_completion, chat_error, read_chat_call
from strop.agents.endpoint.messages import MessageStream, message_error, read_messages_call, whole_message
from strop.agents.endpoint.processes import ConnectionOwners
from strop.agents.endpoint.responses import ResponseStream, read_responses_call, whole_response
from strop.agents.endpoint.session import EndpointSession, ToolFormat
from strop.agents.endpoint.streaming import EventStream, Send, StreamFormat, TextFeed
from strop.agents.episode import Episode
from strop.agents.tool_schema import JsonObject
from strop.extras import require

if TYPE_CHECKING:
    import uvicorn

log = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20
"""Bytes of a request."""
BACKLOG = 4096
MODEL = "policy"
"""The name in the list of models where there is one policy. Calls may use any name."""
REMEMBERED_KEYS = 10_000
"""Keys of ended episodes, so that late calls can be told from wrong keys."""

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class ApiFormat:
    """How one API writes requests, answers and errors."""

    read: Callable[[bytes], ModelCall]
    whole: Callable[[ModelAnswer], JsonObject]
    stream: Callable[[ModelCall], StreamFormat]
    error: Callable[[ApiRefusal], JsonObject]


CHAT = ApiFormat(read_chat_call, chat_completion, ChatStream, chat_error)
FORMATS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": ApiFormat(read_responses_call, whole_response, ResponseStream, chat_error),
    "/v1/messages": ApiFormat(read_messages_call, whole_message, MessageStream, message_error),
}


class EndpointServer:
    """Serves the sessions of all episodes of a run."""

    def __init__(
        self,
        tool_format: str,
        *,
        host: str,
        max_calls: int,
        adapters: Mapping[str, str | None] | None = None,
    ) -> None:
        """`adapters`: by policy, its adapter in the engine; None: there is one policy."""
        self.adapters = dict(adapters or {})
        self.tool_format = ToolFormat(tool_format)
        self.host = host
        self.max_calls = max_calls
        self.counts: Counter[str] = Counter()
        """Requests that belong to no running episode."""
        self._sessions: dict[str, EndpointSession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._port = 0
        self._owners = ConnectionOwners()
        self._closing: list[Callable[[], Awaitable[None]]] = []

    @property
    def address(self) -> str:
        """The URL without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._port}"

    async def start(self) -> None:
        """Listen, unless it does already."""
        async with self._starting:
            if self._server is not None:
                return
            uvicorn = require("uvicorn", extra="serve", why="rollout.agent.endpoint")
            listener = _listen(self.host)
            self._port = listener.getsockname()[1]
            settings = uvicorn.Config(
                self._app,
                interface="asgi3",
                lifespan="off",
                ws="none",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
            )
            self._server = uvicorn.Server(settings)
            self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
            while not self._server.started:
                if self._serving.done():
                    await self._serving
                await asyncio.sleep(0.005)

    def when_closing(self, close: Callable[[], Awaitable[None]]) -> None:
        """Await `close()` before the endpoint closes."""
        self._closing.append(close)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        while self._closing:
            await self._closing.pop()()
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        self._server.force_exit = True
        with suppress(asyncio.CancelledError):
            await self._serving
        self._server = None

    @asynccontextmanager
    async def session(self, episode: Episode, players: Sequence[str] = ()) -> AsyncIterator[EndpointSession]:
        """Open a session for an episode, or for each of its players; the first one is given, and has the
        others. When it ends, the recorded calls become the episode's sample."""
        await self.start()
        opened = []
        for place, player in enumerate(players or list(self.adapters) or [""]):
            opened.append(
                EndpointSession(
                    episode,
                    self.tool_format,
                    max_calls=self.max_calls,
                    player=player,
                    place=place,
                    adapter=self.adapters.get(player),
                )
            )
        session, *session.others = opened
        for one in opened:
            one.flooded = session.flooded
            if self.adapters:
                one.by_model = {other.player: other for other in opened}
            self._sessions[one.key] = one
        try:
            yield session
        finally:
            session.end()
            for one in opened:
                del self._sessions[one.key]
                if one.program_mark is not None:
                    self._owners.forget(one.program_mark)
                self._ended[one.key] = None
            while len(self._ended) > REMEMBERED_KEYS:
                self._ended.popitem(last=False)
            episode.counts.update(self.counts)
            self.counts.clear()
            session.hand_over()

    # --- HTTP -----------------------------------------------------------------------------------------------

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        assert scope["type"] == "http", scope["type"]
        path = scope["path"].rstrip("/")
        api = FORMATS.get(path, CHAT)
        stream: EventStream | None = None
        try:
            session = self._session_of(_keys(scope))
            if path == "/v1/models" and scope["method"] == "GET":
                await _send_json(send, 200, _model_list(list(self.adapters) or [MODEL]))
                return
            with session.request():
                await self._check_program(session, scope)
                if path not in FORMATS or scope["method"] != "POST":
                    raise ApiRefusal(
                        404, f"Unknown request URL: {scope['method']} {path}.", code="unknown_url"
                    )
                call = api.read(await _read_body(receive))
                if call.stream:
                    stream = EventStream(send, api.stream(call))
                answer = await self._answer(session.answering(call), call, receive, stream)
                if answer is not None and stream is not None:
                    await stream.end(answer)
        except ApiRefusal as refusal:
            if stream is not None and stream.begun:
                await stream.refuse(refusal)
            else:
                await _send_json(send, refusal.status, api.error(refusal))
            return
        if answer is not None and stream is None:
            await _send_json(send, 200, api.whole(answer))

    def _session_of(self, keys: Sequence[str]) -> EndpointSession:
        for key in keys:
            if key in self._sessions:
                return self._sessions[key]
        if any(key in self._ended for key in keys):
            self.counts["calls_after_end"] += 1
            raise ApiRefusal(
                401, "The episode of this key has ended; it takes no more calls.", code="invalid_api_key"
            )
        self.counts["wrong_keys"] += 1
        raise ApiRefusal(401, "Incorrect API key provided.", code="invalid_api_key")

    async def _check_program(self, session: EndpointSession, scope: Scope) -> None:
        """Refuse a call that comes from the program of another episode: two programs have one key. Looked at
        once per connection."""
        mark = session.program_mark
        client = scope.get("client")
        if mark is None or client is None or client[1] in session.known_ports:
            return
        found = await asyncio.to_thread(self._owners.mark, client[1], self._port, mark)
        if found not in (None, mark):
            session.episode.counts["shared_keys"] += 1
            raise ApiRefusal(
                403,
                "This key belongs to the episode of another program; each program has one of its own.",
                code="key_of_another_episode",
            )
        session.known_ports.add(client[1])

    async def _answer(
        self, session: EndpointSession, call: ModelCall, receive: Receive, stream: EventStream | None
    ) -> ModelAnswer | None:
        """Return the answer; None, and nothing is recorded, if the client went away before it. `stream` gets
        its text while it is sampled."""
        feed = TextFeed(call)
        sampling = session.start(call, feed)
        gone = asyncio.ensure_future(_until_disconnect(receive))
        try:
            if stream is None or not feed.early:
                await asyncio.wait((sampling, gone), return_when=asyncio.FIRST_COMPLETED)
            else:
                await _forward(feed, stream, (sampling, gone))
            if sampling.cancelled():
                raise session.after_end()
            if sampling.done():
                error = sampling.exception()
                if error is not None and not isinstance(error, ApiRefusal):
                    # Of the engine: the episode fails.
                    said = f"No answer was sampled: {type(error).__name__}: {error}"
                    raise ApiRefusal(500, said, code="server_error") from error
                return sampling.result()
            session.episode.counts["abandoned_calls"] += 1
            return None
        finally:
            for task in (sampling, gone):
                task.cancel()


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ValueError(
            f"rollout.agent.endpoint_host={host} cannot be listened on: {error.strerror}."
        ) from error


def _keys(scope: Scope) -> list[str]:
    """Return the keys of a request: a bearer token, and the header of Anthropic's API. Its client sends both
    where the environment has a token of the user too (ANTHROPIC_AUTH_TOKEN)."""
    found = []
    for name, value in scope["headers"]:
        text = str(value.decode("latin-1")).strip()
        if name == b"authorization":
            scheme, _, token = text.rpartition(" ")
            if scheme.strip().lower() in ("", "bearer"):
                found.append(token)
        elif name == b"x-api-key":
            found.append(text)
    return found


async def _read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiRefusal(400, "The client closed the connection.", fails=False)
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise ApiRefusal(413, f"The request has more than {MAX_BODY >> 20} MB.", code="request_too_large")
        if not message.get("more_body"):
            return bytes(body)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _model_list(names: Sequence[str]) -> JsonObject:
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "strop"} for name in names]
    return {"object": "list", "data": models}


async def _send_json(send: Send, status: int, content: JsonObject) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _forward(feed: TextFeed, stream: EventStream, ends: Sequence[asyncio.Future[Any]]) -> None:
    """Send text until one of `ends` is done."""
    while not any(end.done() for end in ends):
        more = asyncio.ensure_future(feed.text())
        try:
            await asyncio.wait((*ends, more), return_when=asyncio.FIRST_COMPLETED)
            if more.done() and feed.head is not None:
                await stream.text(feed.head, more.result())
        finally:
            more.cancel()
