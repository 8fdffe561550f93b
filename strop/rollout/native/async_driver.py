"""`agenerate` of the native engine: all coroutines share one batch, which one thread steps while any request
is pending.

Between steps the thread must get Python's interpreter lock soon. Every call into torch releases the lock for
a moment. If another thread runs Python code then, the engine waits for the switch interval, by default 5 ms
each time, so it makes 80 calls per second instead of 90,000, and a GPU is idle. So on a GPU the interval is
made shorter while the engine steps. On a CPU the calls are long and the default interval is better.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from strop.concurrency import call_soon_in
from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.cancellation import result_when_free
from strop.rollout.native.requests import RequestState

_SWITCH_INTERVAL = 5e-4
"""Seconds."""


class _SwitchInterval:
    """The interval belongs to the whole process, and engines start and stop in any order: the last one
    restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._before = 0.0

    @contextmanager
    def shortened(self) -> Iterator[None]:
        with self._lock:
            if self._num_users == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SWITCH_INTERVAL))
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    sys.setswitchinterval(self._before)


short_switch_interval = _SwitchInterval().shortened


class SteppedEngine(Protocol):
    """What the driver needs of the native engine."""

    @property
    def idle(self) -> bool: ...

    def borrowed_model(self) -> AbstractContextManager[None]: ...

    def submit(
        self,
        request: Request,
        sampling: Sampling,
        on_done: Callable[[RequestState], None] | None = None,
        *,
        multi_turn: bool = False,
    ) -> RequestState: ...

    def step(self) -> None: ...

    def cancel(self, state: RequestState) -> None: ...


@dataclass(eq=False)
class PendingRequest:
    """A coroutine that waits for its completions."""

    request: Request
    sampling: Sampling
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Completion]]
    state: RequestState | None = None
    cancelled: bool = False

    def settle(self, error: BaseException | None = None) -> None:
        """Resume the coroutine, from any thread."""
        if not self.loop.is_closed():
            call_soon_in(self.loop, partial(self._settle, error))

    def _settle(self, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None and self.state is not None:
            error = self.state.error
        if error is not None:
            self.future.set_exception(error)
        elif self.state is None:  # cancelled before it was submitted
            self.future.cancel()
        else:
            self.future.set_result(self.state.result())


class AsyncDriver:
    def __init__(self, engine: SteppedEngine, *, short_calls: bool) -> None:
        """`short_calls`: the engine's calls into torch are short, so the switch interval is shortened."""
        self._engine = engine
        self.short_calls = short_calls
        self._inbox: deque[PendingRequest] = deque()
        self._outbox: deque[PendingRequest] = deque()
        self._lock = threading.Lock()
        self._driving = False
        self._executor: ThreadPoolExecutor | None = None

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Completions of one request; requests of other coroutines join the same batch."""
        loop = asyncio.get_running_loop()
        pending = PendingRequest(request, sampling, loop, loop.create_future())
        self._inbox.append(pending)
        # Not at once: first all ready coroutines add their requests, so that they start as one batch.
        loop.call_soon(self._start)

        def stop() -> None:
            pending.cancelled = True
            if pending.state is not None:
                self._engine.cancel(pending.state)

        return await result_when_free(pending.future, stop)

    def _start(self) -> None:
        with self._lock:
            if self._driving or not self._inbox:
                return
            self._driving = True
            self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="strop-rollout")
            self._executor.submit(self._drive)

    def _drive(self) -> None:
        """Step until no request is pending; new requests join at the next step."""
        try:
            while self._driving:
                with self._engine.borrowed_model(), self._switch_interval():
                    self._step_all()
                # The module is returned before the last results: who has all of them may use it at once.
                self._settle_finished()
                with self._lock:
                    self._driving = bool(self._inbox)
        except BaseException as error:
            with self._lock:
                self._driving = False
            self._settle_finished()
            while self._inbox:
                self._inbox.popleft().settle(error)
            raise

    def _switch_interval(self) -> AbstractContextManager[None]:
        if self.short_calls:
            return short_switch_interval()
        return nullcontext()

    def _step_all(self) -> None:
        while True:
            while self._inbox:
                self._submit(self._inbox.popleft())
            if self._engine.idle:
                return
            self._settle_finished()
            self._engine.step()

    def _settle_finished(self) -> None:
        while self._outbox:
            self._outbox.popleft().settle()

    def _submit(self, pending: PendingRequest) -> None:
        if pending.cancelled:
            self._outbox.append(pending)
            return

        def on_done(_: RequestState) -> None:
            self._outbox.append(pending)

        try:
            pending.state = self._engine.submit(pending.request, pending.sampling, on_done, multi_turn=True)
        except Exception as error:  # noqa: BLE001 - raised in the coroutine
            pending.settle(error)
            return
        if pending.cancelled:
            self._engine.cancel(pending.state)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None
