"""Coroutines at the engine's door: all of them share one batch, which a thread of its own steps as long as anybody waits."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native.ticket import Ticket
from strop.rollout.native.turns import quick_turns

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

    def settle(self, error: BaseException | None = None) -> None:
        """Wake the coroutine, from any thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        if self.answer.done():
            return
        error = error or (self.ticket.error if self.ticket is not None else None)
        if error is not None:
            self.answer.set_exception(error)
        elif self.ticket is not None:
            self.answer.set_result(self.ticket.result())


class Front:
    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.quick = engine.device.type == "cuda"
        """Whether the engine's calls into torch are short, so that it must have its turn at the interpreter soon."""
        self._inbox: deque[Ask] = deque()
        self._outbox: deque[Ask] = deque()
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
            while self._driving:
                with self._engine.loan(), quick_turns() if self.quick else nullcontext():
                    self._work()
                # The module is given back before the last answers are: who has all of them may use it at once.
                self._answer()
                with self._lock:
                    self._driving = bool(self._inbox)
        except BaseException as error:
            with self._lock:
                self._driving = False
            self._answer()
            while self._inbox:
                self._inbox.popleft().settle(error)
            raise

    def _work(self) -> None:
        while True:
            while self._inbox:
                self._let_in(self._inbox.popleft())
            if self._engine.idle:
                return
            self._answer()
            self._engine.step()

    def _answer(self) -> None:
        while self._outbox:
            self._outbox.popleft().settle()

    def _let_in(self, ask: Ask) -> None:
        if ask.gone:
            return
        try:
            ask.ticket = self._engine.submit(ask.request, ask.sampling, lambda _: self._outbox.append(ask), lasting=True)
        except Exception as error:  # noqa: BLE001 - belongs to whoever asked
            ask.settle(error)
            return
        if ask.gone:
            self._engine.cancel(ask.ticket)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None
