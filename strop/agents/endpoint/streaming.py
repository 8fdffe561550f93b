"""Answers as streams that begin while the engine samples.

The engine reports tokens from a thread of its own; their text is sent as soon as no later token can change
it. What may be a tool call is sent at the end, when it can be read. A call with stop texts or log-probs is
answered at the end as a whole: the last tokens may be cut off again, and log-probs stand beside their text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from strop.agents.endpoint.calls import AnswerHead, ApiRefusal, ModelAnswer, ModelCall

Send = Callable[[dict[str, Any]], Awaitable[None]]
_CALL_STARTS = "<{["
"""Tool calls of all formats begin with one of these."""
_SHARE = 16
"""The text is decoded again when it has grown by one part in so many: the work stays linear in its length."""


class StreamFormat(Protocol):
    """How one API writes a stream."""

    def begin(self, head: AnswerHead) -> Iterator[str]:
        """Yield the events before the first text."""
        ...

    def text(self, piece: str) -> Iterator[str]:
        """Yield the events of a piece of the text."""
        ...

    def end(self, answer: ModelAnswer, rest: str) -> Iterator[str]:
        """Yield the events after `rest`, the last piece of the text, which was not sent: tool calls, the
        end."""
        ...

    def error(self, refusal: ApiRefusal) -> Iterator[str]:
        """Yield the events of an answer that breaks off."""
        ...


def settled(text: str, has_tools: bool) -> str:
    """Return the beginning of an answer's text that later tokens cannot change."""
    if has_tools:
        if text[:1].isspace():  # parsers remove it
            return ""
        for start in _CALL_STARTS:
            text = text.partition(start)[0]
    # A character of several tokens is U+FFFD until its last one; white space may belong to the next word.
    return text.rstrip("\ufffd").rstrip()


class TextFeed:
    """The tokens of one answer while it is sampled."""

    def __init__(self, call: ModelCall) -> None:
        self.early = call.stream and not call.stop and not call.wants_log_probs
        """Whether text can be sent before the answer is complete."""
        self.head: AnswerHead | None = None
        self._has_tools = bool(call.tools)
        self._decode: Callable[[list[int]], str] | None = None
        self._stop_ids: frozenset[int] = frozenset()
        self._loop = asyncio.get_running_loop()
        self._ids: list[int] = []
        self._decoded = 0
        self._grown = asyncio.Event()

    def begin(self, head: AnswerHead, decode: Callable[[list[int]], str], stop_ids: Sequence[int]) -> None:
        """The call was accepted. `decode`: the text of ids without special tokens."""
        self.head = head
        self._decode = decode
        self._stop_ids = frozenset(stop_ids)

    def on_tokens(self, sample: int, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """For `Request.on_tokens`, from any thread."""
        self._loop.call_soon_threadsafe(self._add, list(ids))

    def _add(self, ids: list[int]) -> None:
        self._ids += [token for token in ids if token not in self._stop_ids]
        if len(self._ids) * _SHARE >= self._decoded * (_SHARE + 1):
            self._grown.set()

    async def text(self) -> str:
        """Wait for more tokens; the text so far that stays."""
        await self._grown.wait()
        self._grown.clear()
        assert self._decode is not None
        self._decoded = len(self._ids)
        return settled(self._decode(self._ids), self._has_tools)


class EventStream:
    """The HTTP answer of one streamed call. It begins with the first text, so that a call that is refused
    before has the status of an error."""

    def __init__(self, send: Send, written: StreamFormat) -> None:
        self._send = send
        self._written = written
        self._sent = ""
        self.begun = False

    async def text(self, head: AnswerHead, text: str) -> None:
        """Send what `text` has more than was sent."""
        piece = self._rest(text)
        if piece:
            await self._begin(head)
            self._sent = text
            await self._events(self._written.text(piece))

    async def end(self, answer: ModelAnswer) -> None:
        """Send what is left of the answer, and the end."""
        rest = self._rest(answer.content)
        await self._begin(answer)
        await self._events(self._written.end(answer, rest))
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, refusal: ApiRefusal) -> None:
        """End a stream that has begun with an error."""
        await self._events(self._written.error(refusal))
        await self._send({"type": "http.response.body", "body": b""})

    def _rest(self, text: str) -> str:
        if not text.startswith(self._sent):
            raise ApiRefusal(
                500,
                "The tokenizer of this model changes text when more tokens follow, so answers cannot be "
                "streamed; call without stream.",
                code="server_error",
            )
        return text[len(self._sent) :]

    async def _begin(self, head: AnswerHead) -> None:
        if self.begun:
            return
        self.begun = True
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._events(self._written.begin(head))

    async def _events(self, events: Iterator[str]) -> None:
        for event in events:
            await self._send({"type": "http.response.body", "body": event.encode(), "more_body": True})
