"""Thread pools that answer requests: one for quick answers, a smaller one for searches through many files.

The number of threads bounds memory, because a thread keeps the memory of the largest file it has read; and a
search does not block the pages of other clients. Identical requests at the same time are answered once, and
requests whose clients have all disconnected are dropped. The more requests wait, the less time each search
gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

QUICK_THREADS = 4
SEARCH_THREADS = 2
"""Threads of the two pools."""
MAX_SEARCH_SECONDS = 0.8
MIN_SEARCH_SECONDS = 0.02
"""Limits of the seconds that one search may take."""
TARGET_LATENCY_SECONDS = 1.0
"""Seconds within which every waiting request should get a thread."""
Answer = tuple[int, str]
"""Status and body."""
CLIENT_CLOSED_REQUEST: Answer = (499, "")
"""The answer to a client that has disconnected."""


class Client(Protocol):
    """The part of a request that says whether its client still waits."""

    async def is_disconnected(self) -> bool: ...


@dataclass
class SharedRequest:
    """A request that is being answered, and the clients that wait for it."""

    clients: list[Client] = field(default_factory=list)
    answer: asyncio.Task[Answer] | None = None

    async def all_disconnected(self) -> bool:
        gone = [await client.is_disconnected() for client in list(self.clients)]
        return all(gone) and len(gone) == len(self.clients)


class WorkerPool:
    """Threads that answer requests."""

    def __init__(self, size: int):
        self.size = size
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="board")
        self._free = asyncio.Semaphore(size)
        self._requests: dict[str, SharedRequest] = {}

    async def answer(self, name: str, compute: Callable[[float], Answer], client: Client) -> Answer:
        """Run `compute(seconds)` as soon as a thread is free; `seconds` is its time slice. Requests with the
        same name share one result."""
        shared = self._requests.get(name)
        if shared is None:
            shared = SharedRequest()
            self._requests[name] = shared
            shared.answer = asyncio.create_task(self._answer(name, compute, shared))
        shared.clients.append(client)
        assert shared.answer is not None
        return await asyncio.shield(shared.answer)

    async def _answer(self, name: str, compute: Callable[[float], Answer], shared: SharedRequest) -> Answer:
        try:
            async with self._free:
                if await shared.all_disconnected():
                    return CLIENT_CLOSED_REQUEST
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, compute, self._time_slice()
                )
        finally:
            del self._requests[name]

    def _time_slice(self) -> float:
        """Seconds for the next search: less, the more requests wait."""
        fair = TARGET_LATENCY_SECONDS * self.size / len(self._requests)
        return min(MAX_SEARCH_SECONDS, max(MIN_SEARCH_SECONDS, fair))
