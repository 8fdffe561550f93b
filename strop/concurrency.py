"""Run blocking calls in a few threads, each with a timeout, and coroutines on a background event loop.

A thread cannot be killed. A call that exceeds its timeout keeps its thread: its item gets a TimeoutError, a
new thread replaces the blocked one, and the late result is discarded. The number of blocked threads is logged
as it grows. Code that never releases the GIL (a catastrophic regular expression) needs a process instead:
`rewards/timelimit.py`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")


def call_each(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int = 1,
    timeout: float | None = None,
    before: Callable[[], None] | None = None,
) -> list[Result | Exception]:
    """Return `function(item)`, or the exception it raised, for every item; items start in order.

    At most `workers` calls run at the same time. An item that takes longer than `timeout` seconds gives a
    TimeoutError, and a result of None gives a ValueError. `before` is called before each item and does not
    count towards its timeout.
    """
    if not items:
        return []
    return _CallRound(function, items, timeout, before).run(workers)


class BlockedCalls:
    """The number of calls of this process that timed out and have not returned."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._next_warning = 10

    def add(self, change: int) -> None:
        with self._lock:
            self.count += change
            if self.count < self._next_warning:
                return
            self._next_warning *= 10
        log.warning(
            "%d calls exceeded their time limit and have not returned; each keeps a thread of this process. "
            "If it is a reward function that hangs, set reward_model.reward_manager=prime, which runs it in "
            "processes and kills them.",
            self.count,
        )


blocked_calls = BlockedCalls()


class _CallRound(Generic[Item, Result]):
    """The calls of one `call_each`; all fields below `changed` are read and written while holding it."""

    def __init__(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        timeout: float | None,
        before: Callable[[], None] | None,
    ):
        self.function = function
        self.items = items
        self.timeout = timeout
        self.before = before
        self.changed = threading.Condition()
        self.results: dict[int, Result | Exception] = {}
        self.next_index = 0
        self.started: dict[int, float] = {}
        """Start time of each running call."""
        self.late: set[int] = set()
        """Calls that timed out."""

    def run(self, workers: int) -> list[Result | Exception]:
        count = len(self.items)
        try:
            for _ in range(min(workers, count)):
                self._start_thread()
            with self.changed:
                while len(self.results) < count:
                    self.changed.wait(self._seconds_to_next_deadline())
                    self._time_out_late_calls()
            return [self.results[index] for index in range(count)]
        finally:
            # A blocked thread keeps this object, which must not keep the samples of the whole step. If a
            # signal ends the wait, no further call starts.
            self.items = ()
            self.results = {}

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="strop-call", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self.changed:
                if self.next_index >= len(self.items):
                    return
                index = self.next_index
                item = self.items[index]
                self.next_index += 1
            result = self._call(index, item)
            with self.changed:
                if index in self.late:
                    blocked_calls.add(-1)
                    return  # another thread replaced this one
                self._finish(index, result)

    def _call(self, index: int, item: Item) -> Result | Exception:
        try:
            if self.before is not None:
                self.before()
            with self.changed:
                self.started[index] = time.monotonic()
            return self.function(item)
        except Exception as error:  # noqa: BLE001 - an error belongs to its item and must not end the round
            return error
        except BaseException as error:  # noqa: BLE001 - sys.exit() in a call must not end the thread silently
            return RuntimeError(f"{type(error).__name__}: {error}")

    def _finish(self, index: int, result: Result | Exception) -> None:
        if result is None:
            result = ValueError("The function returned None; did it forget `return`?")
        self.results[index] = result
        self.started.pop(index, None)
        if len(self.results) == len(self.items):
            self.changed.notify_all()

    def _seconds_to_next_deadline(self) -> float | None:
        if self.timeout is None:
            return None
        # A call that starts during the wait cannot be late before a whole timeout has passed.
        first_start = min(self.started.values(), default=time.monotonic())
        return max(0.0, first_start + self.timeout - time.monotonic())

    def _time_out_late_calls(self) -> None:
        if self.timeout is None:
            return
        now = time.monotonic()
        for index, start in list(self.started.items()):
            if now - start >= self.timeout:
                self.late.add(index)
                blocked_calls.add(1)
                self._finish(index, TimeoutError(_timeout_message(f"{self.timeout:g}")))
                self._start_thread()


class _Mailbox:
    """Calls from other threads that an event loop has not made yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        with self._lock:
            self._calls.append(call)
            is_first = len(self._calls) == 1
        if is_first:
            loop.call_soon_threadsafe(self._make, loop)

    def _make(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            loop.call_soon(call)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()
_mailboxes_lock = threading.Lock()


def call_soon_in(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Like `loop.call_soon_threadsafe(call)`, for many calls: those that come before the loop runs share one
    wake-up.

    A wake-up is a system call that releases the GIL. A thread that makes one beside a busy event loop waits
    for the GIL afterwards, up to the switch interval.
    """
    with _mailboxes_lock:
        mailbox = _mailboxes.get(loop)
        if mailbox is None:
            mailbox = _mailboxes[loop] = _Mailbox()
    mailbox.add(loop, call)


class BackgroundLoop:
    """One event loop in a background thread, kept for the whole run so that client sessions can be reused.

    It is independent of an event loop that may be running in the caller's thread.
    """

    def __init__(self, name: str = "strop-background-loop") -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout: float | None = None) -> Result:
        """Run a coroutine to its end, from any other thread; it is cancelled after `timeout` seconds."""
        limited = _with_timeout(contained(coroutine), timeout)
        return asyncio.run_coroutine_threadsafe(limited, self._running_loop()).result()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine and return at once; cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(contained(coroutine), self._running_loop())

    def close(self) -> None:
        """Stop the loop; it starts again with the next call."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=_run_until_stopped, args=(self._loop,), name=self.name, daemon=True
                ).start()
            return self._loop


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop. sys.exit() in a task of user code ends `run_forever`, and all other coroutines of
    the loop would wait for ever."""
    while True:
        try:
            loop.run_forever()
            return
        except (SystemExit, KeyboardInterrupt) as error:
            log.warning("A task was ended by %s; the others go on.", type(error).__name__)


async def contained(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Await a coroutine; sys.exit() in it ends the call, not the event loop that runs it."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _with_timeout(coroutine: Coroutine[Any, Any, Result], timeout: float | None) -> Result:
    try:
        return await asyncio.wait_for(coroutine, timeout)
    except TimeoutError as error:
        if str(error):
            raise  # raised by the coroutine itself
        raise TimeoutError(_timeout_message(str(timeout))) from error


def _timeout_message(seconds: str) -> str:
    return f"The call did not return within its limit of {seconds} seconds."
