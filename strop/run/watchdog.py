"""A thread that notices when this process hangs: it writes all stacks, warns, and ends the process on a
timeout.

A process whose interpreter is stuck in C code cannot run this thread either. For that case the thread resets
a timer outside the interpreter (faulthandler) every second; when the timer is not reset it writes the stacks
and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from strop.run.health.monitor import write_stall_alert
from strop.run.heartbeat import FAILED, Heartbeat, WorkerState, stacks_file

log = logging.getLogger(__name__)

HUNG = 75
"""Exit code of a worker whose phase took longer than trainer.phase_timeout."""
ORPHANED = 76
"""Exit code of a worker whose parent process is gone."""
CHECK_INTERVAL = 1.0
TOUCH_INTERVAL = 60.0
"""Seconds between two signs of life in a long phase."""
MAX_DUMPED_THREADS = 100
"""faulthandler stops after this many threads."""
TIMER_MARGIN = 30.0
"""Seconds that the timer outside the interpreter adds to the timeout."""


@dataclass(frozen=True)
class WatchdogLimits:
    """When the watchdog acts."""

    warning: float
    """Seconds in a phase after which a warning is logged; 0: never."""
    timeout: float
    """Seconds in a phase after which the process is ended; 0: never."""


@contextlib.contextmanager
def start_watchdog(heart: Heartbeat, limits: WatchdogLimits, starter: int | None = None) -> Iterator[None]:
    """Watch inside the block whether this process makes progress, and whether `starter` is still its
    parent."""
    stopped = threading.Event()
    with contextlib.ExitStack() as open_files:
        try:
            stacks = open_files.enter_context(stacks_file(heart.directory, heart.last.rank).open("a"))
        except OSError:  # the heartbeat has logged it
            yield
            return
        watcher = threading.Thread(
            target=_watch, args=(heart, limits, starter, stacks, stopped), name="watchdog", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            stopped.set()
            watcher.join()
            if limits.timeout:
                faulthandler.cancel_dump_traceback_later()


def _watch(
    heart: Heartbeat, limits: WatchdogLimits, starter: int | None, stacks: TextIO, stopped: threading.Event
) -> None:
    warned: WorkerState | None = None
    next_touch = time.monotonic() + TOUCH_INTERVAL
    while not stopped.wait(CHECK_INTERVAL):
        if starter is not None and os.getppid() != starter:
            os._exit(ORPHANED)
        if time.monotonic() > next_touch:
            heart.touch()
            next_touch = time.monotonic() + TOUCH_INTERVAL
        worker = heart.last
        seconds = heart.seconds_in_phase()
        if limits.timeout:
            faulthandler.dump_traceback_later(
                max(limits.timeout - seconds, 0) + TIMER_MARGIN, exit=True, file=stacks
            )
        if limits.timeout and seconds > limits.timeout:
            _write_stacks(worker, seconds, stacks)
            heart.beat(worker.step, f"{FAILED}{worker.phase}")
            _report_and_exit(worker, limits.timeout, stacks.name)
        if limits.warning and seconds > limits.warning and worker is not warned:
            warned = worker
            _write_stacks(worker, seconds, stacks)
            log.warning(
                "%s for %.0f s: what it does is written in %s.",
                str(worker).capitalize(),
                seconds,
                stacks.name,
            )
            write_stall_alert(heart.directory, worker.step, worker.phase, seconds, stacks.name)


def _write_stacks(worker: WorkerState, seconds: float, stacks: TextIO) -> None:
    with contextlib.suppress(OSError):  # a full disk must not end this thread: nobody would reset the timer
        os.write(stacks.fileno(), f"\n--- {worker} for {seconds:.0f} s\n".encode())
        faulthandler.dump_traceback(stacks, all_threads=True)
        if threading.active_count() >= MAX_DUMPED_THREADS:
            os.write(stacks.fileno(), _main_stack().encode())


def _main_stack() -> str:
    """The main thread in faulthandler's format: faulthandler writes it last, and not at all after too many
    threads."""
    frames = traceback.extract_stack(_current_frames().get(threading.main_thread().ident or 0))
    text = f"\nThread 0x{threading.main_thread().ident:016x} (most recent call first):\n"
    for frame in reversed(frames):
        text += f'  File "{frame.filename}", line {frame.lineno} in {frame.name}\n'
    return text


def _current_frames() -> dict[int, FrameType]:
    """The stacks of all threads, read without garbage collection: CPython before 3.12 holds a lock meanwhile,
    for which the end of a thread-local object waits, and the process would hang for ever."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _report_and_exit(worker: WorkerState, timeout: float, where: str) -> None:
    with contextlib.suppress(OSError):
        text = (
            f"strop: error: {str(worker).capitalize()} for more than trainer.phase_timeout={timeout:g} s. "
            f"The stacks of all its threads are in {where}.\n"
        )
        os.write(2, text.encode())
    os._exit(HUNG)
