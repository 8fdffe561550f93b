"""How SIGTERM (Slurm, Kubernetes, spot machines) and SIGINT (Ctrl-C) end a run: in order, with a checkpoint.

The handler only notes the signal where a training loop must not be interrupted (`deferred`), and raises
StopRequested where the loop can drop what it does (`droppable`) and outside of the loop. A thread ends the
process when the grace period is over. A second signal ends it at once.

A run that is started from Python (a notebook) must not end its process: there a second SIGINT raises
KeyboardInterrupt, and the end of the grace period is only logged.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from strop.errors import STOPPED

log = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], object] | int | None
SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_SECONDS = 1.0
"""Signals within this time count as one: a terminal and Slurm signal every process of a run, and the
starter of the ranks forwards what it gets."""
SIGNALLED = 128
"""An exit code of 128 + n means: ended by signal n."""


class StopRequested(BaseException):
    """A signal asked this run to end. It is no Exception: handlers of failed scorers, tools and engines must
    not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.resumable = True
        """Whether the same command goes on without a loss: all finished steps are in a checkpoint."""

    @property
    def exit_code(self) -> int:
        return STOPPED if self.resumable else SIGNALLED + self.number


class StoppedByCaller(StopRequested):
    """A callback asked this run to end. It ends as after SIGINT."""

    def __init__(self) -> None:
        super().__init__(signal.SIGINT)


class SignalLog:
    """The signals that came, where those that come together count as one."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._last = 0.0

    def add(self, number: int) -> bool:
        """Whether this is a new signal."""
        now = time.monotonic()
        new = not self.numbers or now - self._last >= REPEAT_SECONDS
        if new:
            self._last = now
            self.numbers.append(number)
        return new

    @property
    def first(self) -> int | None:
        return self.numbers[0] if self.numbers else None


class StopSignals:
    """The handlers of this process, and the thread that watches the grace period."""

    def __init__(self, grace: float, ends_process: bool = True) -> None:
        self.grace = grace
        self.ends_process = ends_process
        self.signals = SignalLog()
        self.deferred = False
        self.droppable = False
        self.saved = False
        """Whether the state of the run is in a checkpoint, so that late closing does no harm."""
        self._pid = os.getpid()
        self._before: dict[int, Handler] = {}
        self._asked = threading.Event()
        self._finished = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="strop-grace-period", daemon=True)
        self._watcher.start()

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread."""
        if os.getpid() != self._pid:  # a forked child has inherited it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not self.signals.add(number):
            return
        if len(self.signals.numbers) > 1:
            if not self.ends_process:
                raise KeyboardInterrupt
            os._exit(SIGNALLED + number)
        self._asked.set()
        if self.droppable or not self.deferred:
            raise StopRequested(number)

    def install(self) -> None:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self.receive)

    def uninstall(self) -> None:
        """Restore the handlers from before the run. If a signal stopped it, a repeat of that signal is still
        ignored: it would end the process with another exit code while it closes."""
        stopped = self.ends_process and self.signals.first is not None
        for number, handler in self._before.items():
            signal.signal(number, self._ignore_repeat if stopped else handler)
        if stopped:  # the interpreter removes Python's handlers while it ends, but not SIG_IGN
            atexit.register(_ignore_signals)

    def _ignore_repeat(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid and not self.signals.add(number):
            return
        signal.signal(number, self._before[number])
        os.kill(os.getpid(), number)

    def close(self) -> None:
        self._finished.set()
        self._asked.set()
        self._watcher.join()

    def _watch(self) -> None:
        """Log from here, because the handler may have interrupted a writer."""
        self._asked.wait()
        number = self.signals.first
        if number is None:
            return
        log.warning(
            "%s: the run saves its state and ends within trainer.grace_seconds=%g s. A second signal ends it "
            "at once.",
            *(signal.Signals(number).name, self.grace),
        )
        if not self._finished.wait(self.grace):
            if not self.ends_process:
                log.warning(
                    "trainer.grace_seconds=%g s are over and the run has not ended. Interrupt again to end "
                    "it without a checkpoint.",
                    self.grace,
                )
                return
            text = f"strop: error: trainer.grace_seconds={self.grace:g} s are over; the process ends.\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
            os._exit(STOPPED if self.saved else SIGNALLED + number)


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


_active: list[StopSignals] = []
"""Signal handlers belong to the whole process; the last entry has them."""


@contextlib.contextmanager
def handle_stop_signals(grace: float, *, ends_process: bool = True) -> Iterator[None]:
    """Install the handlers in the block, unless `grace` is 0 (signals then end the process as ever).

    Without `ends_process`, the process goes on after a run that does not end in time.
    """
    if grace <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = StopSignals(grace, ends_process)
    handlers.install()
    _active.append(handlers)
    try:
        yield
    finally:
        handlers.uninstall()
        _active.remove(handlers)
        handlers.close()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """In the block, a signal is only noted, except in `droppable` blocks."""
    if not _active:
        yield
        return
    handlers = _active[-1]
    handlers.deferred = True
    try:
        yield
    finally:
        handlers.deferred = False


@contextlib.contextmanager
def droppable(wanted: bool = True) -> Iterator[None]:
    """In the block, a signal raises StopRequested, also one that came before. The block must hold no
    collective operation: the other ranks would wait for this one."""
    if not wanted or not _active or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _active[-1]
    before = handlers.droppable
    try:
        handlers.droppable = True
        number = requested()
        if number is not None:
            raise StopRequested(number)
        yield
    finally:
        handlers.droppable = before


def requested() -> int | None:
    """The signal that asks this process to end, if one came."""
    return _active[-1].signals.first if _active else None


def mark_saved() -> None:
    """The state of the run is in a checkpoint: an end after the grace period loses nothing."""
    if _active:
        _active[-1].saved = True


def first_request(numbers: Sequence[int | None]) -> int | None:
    """The first signal of several ranks."""
    return next((number for number in numbers if number is not None), None)
