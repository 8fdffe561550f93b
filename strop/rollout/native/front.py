"""Coroutines at the engine's door: all of them share one batch, which a thread of its own steps as long as anybody waits."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native.ticket import Ticket

if TYPE_CHECKING:
    from strop.rollout.native.engine import NativeEngine


@dataclass(eq=False)
class Ask:
    """One coroutine that waits for an answer."""

    request: Request
    sampling: Sampling
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[list[Completion]]
    ticket: Ticket | None = None
    gone: bool = False
    """It was cancelled."""

    def on_done(self, ticket: Ticket) -> None:
        self._from_thread(ticket.error, ticket)

    def refuse(self, error: BaseException) -> None:
        self._from_thread(error, None)

    def _from_thread(self, error: BaseException | None, ticket: Ticket | None) -> None:
        def settle() -> None:
            if self.answer.done():
                return
            if error is not None:
                self.answer.set_exception(error)
            elif ticket is not None:
                self.answer.set_result(ticket.result())

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(settle)


class Front:
    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._inbox: deque[Ask] = deque()
        self._lock = threading.Lock()
        self._driving = False
        self._executor: ThreadPoolExecutor | None = None

    async def ask(self, request: Request, sampling: Sampling) -> list[Completion]:
        loop = asyncio.get_running_loop()
        ask = Ask(request, sampling, loop, loop.create_future())
        self._inbox.append(ask)
        # Not at once: every coroutine that is ready to ask does so first, and they start as one batch.
        loop.call_soon(self._start)
        try:
            return await ask.answer
        except asyncio.CancelledError:
            ask.gone = True
            if ask.ticket is not None:
                self._engine.cancel(ask.ticket)
            raise

    def _start(self) -> None:
        with self._lock:
            if self._driving or not self._inbox:
                return
            self._driving = True
            self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="strop-rollout")
            self._executor.submit(self._drive)

    def _drive(self) -> None:
        """Step until nobody waits; those who come meanwhile join at the next step."""
        try:
            with self._engine.loan():
                while self._serve():
                    self._engine.step()
        except BaseException as error:
            with self._lock:
                self._driving = False
            while self._inbox:
                self._inbox.popleft().refuse(error)
            raise

    def _serve(self) -> bool:
        """Let in who stands at the door; whether there is anything to do."""
        while True:
            while self._inbox:
                self._let_in(self._inbox.popleft())
            with self._lock:
                if self._engine.idle and not self._inbox:
                    self._driving = False
                    return False
                if not self._inbox:
                    return True

    def _let_in(self, ask: Ask) -> None:
        if ask.gone:
            return
        try:
            ask.ticket = self._engine.submit(ask.request, ask.sampling, ask.on_done, lasting=True)
        except Exception as error:  # noqa: BLE001  (belongs to whoever asked)
            ask.refuse(error)
            return
        if ask.ticket.done:
            ask.on_done(ask.ticket)
        if ask.gone:
            self._engine.cancel(ask.ticket)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None
