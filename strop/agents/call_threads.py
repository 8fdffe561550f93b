"""Blocking calls of coroutines in daemon threads: a call that hangs blocks neither the event loop nor the end
of the program.

Calls that return at once share a thread. Each change of thread costs up to the switch interval of the
interpreter lock, and an engine that steps beside the agents waits for that lock. Only when no call has
finished for a moment does each waiting call get a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from strop.concurrency import call_soon_in

T = TypeVar("T")
MAX_ABANDONED = 64
"""Threads that never returned, before the function counts as broken."""
IDLE_SECONDS = 30.0
"""A thread without a call ends after this time."""
PATIENCE = 0.002
"""Seconds without a finished call before waiting calls get further threads."""
MAX_STARTED = 64
"""Threads that are started at a time: the event loop waits for each."""


class AbandonableThreads:
    """A thread cannot be stopped: those that were abandoned and still run are counted, and too many of them
    are an error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.abandoned = 0
        self._changed = threading.Condition()
        self._calls: deque[_Call[Any]] = deque()
        """Calls that no thread has taken yet."""
        self._num_idle = 0
        self._num_woken = 0
        """Idle threads that were woken and have not noticed it yet."""
        self._num_finished = 0
        self._watching: asyncio.AbstractEventLoop | None = None
        """The event loop that looks after waiting calls."""

    async def call(self, function: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """Await `function(**arguments)` in a thread."""
        if self.abandoned >= MAX_ABANDONED:
            raise RuntimeError(f"{self.abandoned} earlier calls never returned, so no further one is made")
        loop = asyncio.get_running_loop()
        call = _Call(function, arguments, loop)
        with self._changed:
            self._calls.append(call)
            is_first = len(self._calls) == 1
        try:
            if is_first:  # all threads are busy or idle: there is none on its way to this call
                self._add_threads(1)
            elif self._watching is not loop:
                self._watch(loop)
            return await call.answer
        except BaseException:  # it was cancelled, no thread could be started, or the call raised
            with self._changed:
                if call in self._calls:
                    self._calls.remove(call)  # it must not run later
                elif not call.finished:
                    call.given_up = True
                    self.abandoned += 1
            raise

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watching = loop
        loop.call_later(PATIENCE, self._look, loop, self._num_finished)

    def _look(self, loop: asyncio.AbstractEventLoop, num_finished: int) -> None:
        """Give waiting calls threads of their own if those that run do not return."""
        self._watching = None
        waiting = len(self._calls)
        if waiting:
            self._watch(loop)  # first: there may be no further thread
        if waiting and self._num_finished == num_finished:
            self._add_threads(min(waiting, MAX_STARTED))

    def _add_threads(self, count: int) -> None:
        """So many more threads take calls: idle ones, and new ones."""
        with self._changed:
            woken = min(count, self._num_idle)
            self._num_idle -= woken
            self._num_woken += woken
            self._changed.notify(woken)
        for _ in range(count - woken):
            threading.Thread(target=self._serve, name=self.name, daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._calls:
                    self._num_idle += 1
                    if not self._changed.wait_for(lambda: self._num_woken > 0, IDLE_SECONDS):
                        self._num_idle -= 1
                        return
                    self._num_woken -= 1
                call = self._calls.popleft()
            call.run()
            with self._changed:
                call.finished = True
                self._num_finished += 1
                if call.given_up:
                    self.abandoned -= 1
            call.settle()


class _Call(Generic[T]):
    """One call, and the coroutine that awaits it."""

    def __init__(
        self, function: Callable[..., T], arguments: Mapping[str, Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.loop = loop
        self.answer: asyncio.Future[T] = loop.create_future()
        self.finished = False
        self.given_up = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self.function(**self.arguments)
        except BaseException as error:  # noqa: BLE001 - the caller gets whatever the call raised
            self._error = error

    def settle(self) -> None:
        """Resume the coroutine, from the thread of the call."""
        if not self.loop.is_closed():
            call_soon_in(self.loop, self._settle)

    def _settle(self) -> None:
        error = self._error
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(self._value)  # type: ignore[arg-type] # of T, or None where T is
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            self.answer.set_exception(error)
        else:  # SystemExit and the like must end the call, not the program
            self.answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
