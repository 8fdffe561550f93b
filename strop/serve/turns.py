"""Who uses the model when: sessions take turns in training, and training takes turns with sampling.

There is one set of base weights on the device. Samples of all users run together; a training request has the
model for itself. While training requests wait, no further samples start; when a turn of training ends, the
samples that waited start before the next turn. So neither can keep the other away.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Job = TypeVar("Job")


class FairQueue(Generic[Job]):
    """A queue with one line per session. `take` serves the lines in turn, so a session with a thousand
    requests delays another one by a single request at a time."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Job]] = OrderedDict()

    def put(self, session: str, job: Job) -> None:
        self._lines.setdefault(session, deque()).append(job)

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def take(self) -> Job | None:
        """The next job, or None."""
        if not self._lines:
            return None
        session, line = self._lines.popitem(last=False)
        job = line.popleft()
        if line:
            self._lines[session] = line  # at the end: the others come first
        return job


class ModelTurns:
    """A lock that many samples share and one turn of training has alone, in alternation."""

    def __init__(self) -> None:
        self._running = 0
        """Samples that run."""
        self._training = False
        self._wants_training = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Samples that wait for the end of a turn of training."""
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        if self._training or self._wants_training:
            admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(admitted)
            try:
                await admitted  # `_admit` has counted it
            except asyncio.CancelledError:
                if admitted.done() and not admitted.cancelled():
                    self._leave()
                raise
        else:
            self._enter()
        try:
            yield
        finally:
            self._leave()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        self._wants_training += 1
        try:
            while self._running or self._training:
                await self._idle.wait()
            self._training = True
            self._idle.clear()
        finally:
            self._wants_training -= 1
            if not self._training:  # cancelled while waiting
                self._admit()
        try:
            yield
        finally:
            self._training = False
            self._admit()
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def sampling_after(self, prepare: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Sample after `prepare`, which has a turn of training; no other turn comes in between."""
        async with self.training():
            await prepare()
            self._enter()
        try:
            yield
        finally:
            self._leave()

    def _admit(self) -> None:
        while self._waiting:
            admitted = self._waiting.popleft()
            if not admitted.done():
                admitted.set_result(None)
                self._enter()

    def _enter(self) -> None:
        self._running += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._running -= 1
        if not self._running and not self._training:
            self._idle.set()
