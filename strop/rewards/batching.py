"""Dynamic batching: questions that arrive one by one are answered together, as many at a time as pay off."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class QueueFull(Exception):
    """There is no room for more questions at the moment."""


@dataclass
class Served:
    """What a batcher has done so far."""

    items: int = 0
    batches: int = 0
    failed: int = 0
    """Items of batches that raised."""
    refused: int = 0
    """Items for which the queue had no room."""


@dataclass
class Batcher(Generic[Item, Answer]):
    """Collects items and calls `answer(items)` in a thread of its own, one batch after the other."""

    answer: Callable[[list[Item]], Sequence[Answer]]
    most: int
    """Items in one batch."""
    wait: float
    """Seconds the first item of a batch waits for company."""
    room: int
    """Items that may wait."""
    served: Served = field(default_factory=Served)

    def __post_init__(self) -> None:
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="strop-batch")

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._waiting)

    async def ask(self, items: Sequence[Item]) -> list[Answer]:
        """The answers to all items, or the error of the batch that one of them was in; QueueFull if they do not fit."""
        if len(self) + len(items) > self.room:
            self.served.refused += len(items)
            raise QueueFull(f"{len(self)} texts wait already, and {len(items)} more do not fit into a queue of {self.room}")
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in items]
        self._waiting.extend(zip(items, futures, strict=True))
        self._arrived.set()
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:
                future.cancel()  # whoever asked is gone: what still waits is not computed

    async def run(self) -> None:
        """Answer until cancelled."""
        try:
            while True:
                await self._arrived.wait()
                await self._company()
                batch = self._take()
                if batch:
                    await self._answer(batch)
        finally:
            self._thread.shutdown(wait=False)

    async def _company(self) -> None:
        """Wait for more items, unless a batch is full already."""
        end = asyncio.get_running_loop().time() + self.wait
        while len(self) < self.most and (left := end - asyncio.get_running_loop().time()) > 0:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                break

    def _take(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        batch: list[tuple[Item, asyncio.Future[Answer]]] = []
        while self._waiting and len(batch) < self.most:
            item, future = self._waiting.popleft()
            if not future.done():
                batch.append((item, future))
        if self._waiting:
            self._arrived.set()
        else:
            self._arrived.clear()
        return batch

    async def _answer(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        items = [item for item, _ in batch]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self.answer, items)
            if len(answers) != len(items):
                raise ValueError(f"{len(items)} items were answered with {len(answers)} values.")
        except Exception as error:  # noqa: BLE001 - the border of one batch: those who asked are told, the others are served
            self.served.failed += len(items)
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        self.served.items += len(items)
        self.served.batches += 1
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
