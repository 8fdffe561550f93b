"""Who answers: a few threads for what is quick and fewer for what looks through many files.

A thread keeps the memory of the largest thing it ever read, so memory is bounded by their number and not by the readers'; and
nobody's search holds up the pages of others. A question whose reader has gone is not answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

QUICK, SEARCHING = 4, 2
GONE: tuple[int, str] = (499, "")
"""What a reader is told who does not listen any more."""


class Crew:
    def __init__(self, size: int):
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="board")
        self._free = asyncio.Semaphore(size)

    async def answer(self, question: Callable[[], tuple[int, str]], request: Any) -> tuple[int, str]:
        """Status and body, as soon as a thread is free."""
        async with self._free:
            if await request.is_disconnected():
                return GONE
            return await asyncio.get_running_loop().run_in_executor(self._threads, question)
