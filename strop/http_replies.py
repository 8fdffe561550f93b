"""Limits of what an HTTP server may send to us; every HTTP client of the package reads through this file.

A server that is broken or hostile can send without end. A reply ends with an error when it is larger than
MAX_REPLY_BYTES, and, where the request has a deadline, when it is not complete by then, however slowly its
bytes arrive. Headers count too. Replies are asked for without compression, because a small compressed reply
can stand for any amount of data.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 256 * 2**20
"""Largest reply of a reward server, a sandbox server, a judge, an MCP server or an engine."""
PIECE_BYTES = 2**16
EVENT_STREAM = "text/event-stream"
"""A stream of messages, which lives as long as its connection: the limit holds for each message."""


class ReplyTooLarge(ConnectionError):
    """A server sent more than MAX_REPLY_BYTES."""


class ByteMeter:
    """Counts the bytes of one reply."""

    def __init__(self, url: str, fail: Callable[[str], Exception] = ReplyTooLarge) -> None:
        self.url = url
        self.fail = fail
        self.seen = 0

    def add(self, count: int) -> None:
        """Raise `fail(message)` if the reply is larger than it may be."""
        self.seen += count
        if self.seen > MAX_REPLY_BYTES:
            raise self.fail(
                f"The reply of {self.url} has more than {MAX_REPLY_BYTES:,} bytes, the limit. Look "
                "at what the server sends, or ask for less at a time (smaller batches)."
            )


def read_reply(request: urllib.request.Request, deadline: float) -> bytes:
    """The body of the reply to a request of urllib; TimeoutError at `deadline` (time.monotonic)."""
    request.add_header("Accept-Encoding", "identity")
    opener = urllib.request.build_opener(_PlainHandler(deadline), _SecureHandler(deadline))
    body = bytearray()
    with opener.open(request, timeout=_seconds_left(deadline)) as reply:
        # In pieces: http.client allocates at once what a header announces.
        while piece := reply.read(PIECE_BYTES):
            body += piece
        if reply.length:
            raise http.client.IncompleteRead(bytes(body), reply.length)
    return bytes(body)


class _MeteredSocket(io.RawIOBase):
    """What a socket receives, counted, until a deadline. A timeout of the socket alone begins anew with every
    byte."""

    def __init__(self, received: io.RawIOBase, connection: socket.socket, meter: ByteMeter, deadline: float):
        self.received = received
        self.connection = connection
        self.meter = meter
        self.deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self.connection.settimeout(_seconds_left(self.deadline))
        count: int | None = self.received.readinto(buffer)
        self.meter.add(count or 0)
        return count

    def close(self) -> None:
        self.received.close()
        super().close()


class _LimitedResponse(http.client.HTTPResponse):
    def __init__(
        self, connection: socket.socket, *arguments: Any, meter: ByteMeter, deadline: float, **more: Any
    ):
        super().__init__(connection, *arguments, **more)
        received: Any = self.fp
        self.fp = io.BufferedReader(_MeteredSocket(received.detach(), connection, meter, deadline))


def _connect(kind: type[http.client.HTTPConnection], deadline: float, host: str, **more: Any) -> Any:
    made = kind(host, **more)
    limited = functools.partial(_LimitedResponse, meter=ByteMeter(host), deadline=deadline)
    made.response_class = limited  # type: ignore[assignment]
    return made


class _PlainHandler(urllib.request.HTTPHandler):
    def __init__(self, deadline: float) -> None:
        super().__init__()
        self.connect: Any = functools.partial(_connect, http.client.HTTPConnection, deadline)

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self.connect, request)


class _SecureHandler(urllib.request.HTTPSHandler):
    def __init__(self, deadline: float) -> None:
        super().__init__()
        self.connect: Any = functools.partial(_connect, http.client.HTTPSConnection, deadline)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self.connect, request, context=ssl.create_default_context())


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time of the request is over")
    return left


# --- httpx --------------------------------------------------------------------------------------------------


def limit_replies(
    module: Any, client: httpx.AsyncClient, fail: Callable[[str], Exception] = ReplyTooLarge
) -> None:
    """Limit the replies that `client` gets. `module` is httpx or a library with its interface, and `fail`
    makes the error that the user of the client expects."""

    class LimitedStream(module.AsyncByteStream):
        def __init__(self, stream: Any, meter: ByteMeter) -> None:
            self.stream = stream
            self.meter = meter

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in self.stream:
                self.meter.add(len(piece))
                yield piece

        async def aclose(self) -> None:
            await self.stream.aclose()

    async def ask_for_plain(request: httpx.Request) -> None:
        request.headers["Accept-Encoding"] = "identity"

    async def limit(reply: httpx.Response) -> None:
        url = str(reply.request.url)
        encoding = reply.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise fail(f"The reply of {url} is compressed ({encoding}), which was not asked for.")
        if not reply.headers.get("content-type", "").lower().startswith(EVENT_STREAM):
            reply.stream = LimitedStream(reply.stream, ByteMeter(url, fail))

    client.event_hooks = {"request": [ask_for_plain], "response": [limit]}
