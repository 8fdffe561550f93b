"""Many calls in a few threads, each with a time limit; coroutines run on one loop that lives beside the trainer.

A thread cannot be killed. A call that is late is left alone: its sample gets a TimeoutError, another thread takes over its
place, and whatever it returns in the end is thrown away. Code that holds the interpreter for the whole time (a hanging regular
expression) needs a process instead: `timelimit.py`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

Item = TypeVar("Item")


def call_each(
    function: Callable[[Item], Any],
    items: Sequence[Item],
    *,
    workers: int = 1,
    timeout: float | None = None,
    before: Callable[[], None] | None = None,
) -> list[Any]:
    """`function(item)` for every item, started in order by at most `workers` threads: its result, or its exception.

    An item that takes longer than `timeout` seconds gives a TimeoutError. `before` is called ahead of each item, and does not
    count as its time.
    """
    return _Round(function, items, timeout, before).run(workers) if items else []


class _Round:
    def __init__(
        self,
        function: Callable[[Item], Any],
        items: Sequence[Item],
        timeout: float | None,
        before: Callable[[], None] | None,
    ):
        self.function, self.items, self.timeout, self.before = function, items, timeout, before
        self.results: list[Any] = [None] * len(items)
        self.next = self.done = 0
        self.started: dict[int, float] = {}
        self.changed = threading.Condition()

    def run(self, workers: int) -> list[Any]:
        for _ in range(min(workers, len(self.items))):
            self._start_thread()
        with self.changed:
            while self.done < len(self.items):
                self.changed.wait(self._seconds_to_next_deadline())
                self._give_up_late_ones()
        return self.results

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="strop-reward", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self.changed:
                if self.next == len(self.items):
                    return
                place, self.next = self.next, self.next + 1
            try:
                if self.before is not None:
                    self.before()
                with self.changed:
                    self.started[place] = time.monotonic()
                result = self.function(self.items[place])
            except Exception as error:  # noqa: BLE001 - the border of one sample: whatever went wrong is its result
                result = error
            except BaseException as error:  # noqa: BLE001 - sys.exit() in a scorer must not end the thread silently
                result = RuntimeError(f"{type(error).__name__}: {error}")
            with self.changed:
                if self.results[place] is not None:
                    return  # given up meanwhile; another thread has this one's place
                self._finish(place, result)

    def _finish(self, place: int, result: Any) -> None:
        self.results[place] = result if result is not None else ValueError("The scorer returned None; did it forget `return`?")
        self.started.pop(place, None)
        self.done += 1
        if self.done == len(self.items):
            self.changed.notify_all()

    def _seconds_to_next_deadline(self) -> float | None:
        if self.timeout is None:
            return None
        # A call that starts during the wait cannot be late before a whole time limit has passed.
        first = min(self.started.values(), default=time.monotonic())
        return max(0.0, first + self.timeout - time.monotonic())

    def _give_up_late_ones(self) -> None:
        if self.timeout is None:
            return
        now = time.monotonic()
        for place, start in list(self.started.items()):
            if now - start >= self.timeout:
                self._finish(place, TimeoutError(f"The scorer did not answer within its limit of {self.timeout:g} seconds."))
                self._start_thread()


class BackgroundLoop:
    """An event loop in a thread of its own, the same for the whole run, so that sessions which a scorer keeps stay usable.

    Independent of a loop that may be running in the caller's thread.
    """

    def __init__(self, name: str = "strop-reward-loop") -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Wait for a coroutine, from any thread but the loop's; it is cancelled after `timeout` seconds."""
        return asyncio.run_coroutine_threadsafe(_limited(coroutine, timeout), self._running()).result()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin a coroutine and return at once; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(contained(coroutine), self._running())

    def close(self) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True).start()
            return self._loop


async def contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The same coroutine; sys.exit() in it must end the call, not the loop that runs it."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _limited(coroutine: Coroutine[Any, Any, Any], timeout: float | None) -> Any:
    try:
        return await asyncio.wait_for(coroutine, timeout)
    except TimeoutError as error:
        if str(error):
            raise  # the scorer's own
        raise TimeoutError(f"The scorer did not answer within its limit of {timeout} seconds.") from error
