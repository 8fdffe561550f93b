"""Coroutines at the engine's door: all of them share one batch, which one driver steps in a thread of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native.ticket import Ticket

if TYPE_CHECKING:
    from strop.rollout.native.engine import NativeEngine


class Front:
    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._executor: ThreadPoolExecutor | None = None
        self._driver: asyncio.Task[None] | None = None

    async def ask(self, request: Request, sampling: Sampling) -> list[Completion]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not answer.done():
                answer.set_result(None)

        def wake(_: Ticket) -> None:
            loop.call_soon_threadsafe(settle)

        executor = self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="strop-rollout")
        ticket = await loop.run_in_executor(executor, self._engine.submit, request, sampling, wake)
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._drive(executor))
        await answer
        return ticket.result()

    async def _drive(self, executor: ThreadPoolExecutor) -> None:
        """Step until nobody waits. Between two steps the thread serves those who want to join."""
        loop = asyncio.get_running_loop()
        with self._engine.loan():
            while not self._engine.idle:
                await loop.run_in_executor(executor, self._engine.step)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None
