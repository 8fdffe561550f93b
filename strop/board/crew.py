"""Who answers: a few threads for what is quick and fewer for what looks through many files.

A thread keeps the memory of the largest thing it ever read, so memory is bounded by their number and not by the readers'; and
nobody's search holds up the pages of others. A question that several readers ask at the same time is answered once, and one
whose readers have all gone is not. The more wait, the shorter is each one's turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

QUICK, SEARCHING = 4, 2
LONGEST_TURN, SHORTEST_TURN = 0.8, 0.02
ROUND = 1.0
"""Seconds within which everybody who waits should have had a turn."""
Answer = tuple[int, str]
"""Status and body."""
GONE: Answer = (499, "")
"""What a reader is told who does not listen any more."""


@dataclass
class Shared:
    """A question on its way, and who wants to know."""

    readers: list[Any] = field(default_factory=list)
    answer: asyncio.Task[Answer] | None = None

    async def nobody_listens(self) -> bool:
        gone = [await reader.is_disconnected() for reader in list(self.readers)]
        return all(gone) and len(gone) == len(self.readers)


class Crew:
    def __init__(self, size: int):
        self.size = size
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="board")
        self._free = asyncio.Semaphore(size)
        self._asked: dict[str, Shared] = {}

    async def answer(self, name: str, question: Callable[[float], Answer], reader: Any) -> Answer:
        """As soon as a thread is free. The question, which is the same wherever the name is, gets the seconds of its turn."""
        shared = self._asked.get(name)
        if shared is None:
            shared = self._asked[name] = Shared()
            shared.answer = asyncio.create_task(self._answer(name, question, shared))
        shared.readers.append(reader)
        assert shared.answer is not None
        return await asyncio.shield(shared.answer)

    async def _answer(self, name: str, question: Callable[[float], Answer], shared: Shared) -> Answer:
        try:
            async with self._free:
                if await shared.nobody_listens():
                    return GONE
                return await asyncio.get_running_loop().run_in_executor(self._threads, question, self._turn())
        finally:
            del self._asked[name]

    def _turn(self) -> float:
        fair = ROUND * self.size / len(self._asked)
        return min(LONGEST_TURN, max(SHORTEST_TURN, fair))
