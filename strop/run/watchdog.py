"""A thread that notices when this process stands still: it writes all stacks, warns, and ends the process where that was asked.

A process whose interpreter is stuck inside C code cannot run this thread either. For that case a timer outside the interpreter
is wound up again with every round: if nobody winds it up it writes the stacks and ends the process by itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from strop.run.health import tell_stall
from strop.run.heartbeat import FAILED, Beat, Heartbeat, stacks_of

log = logging.getLogger(__name__)

HUNG = 75
"""Exit code of a worker whose phase took longer than trainer.phase_timeout."""
ORPHANED = 76
"""Exit code of a worker whose starter is gone."""
ROUND = 1.0
MOST_STACKS = 100
"""faulthandler stops after so many threads."""
SPARE = 30.0
"""Seconds that the timer outside the interpreter gives on top."""


@dataclass(frozen=True)
class Limits:
    warning: float = 0.0
    """Seconds after which a phase is told of; 0: never."""
    timeout: float = 0.0
    """Seconds after which a phase ends the process; 0: never."""


@contextlib.contextmanager
def watched(heart: Heartbeat, limits: Limits, starter: int | None = None) -> Iterator[None]:
    """Inside the block somebody looks whether this process moves, and whether the process `starter` still is its parent."""
    over = threading.Event()
    with contextlib.ExitStack() as open_files:
        try:
            stacks = open_files.enter_context(stacks_of(heart.directory, heart.last.rank).open("a"))
        except OSError:  # the heartbeat has told of it
            yield
            return
        watcher = threading.Thread(target=_watch, args=(heart, limits, starter, stacks, over), name="watchdog", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            if limits.timeout:
                faulthandler.cancel_dump_traceback_later()


def _watch(heart: Heartbeat, limits: Limits, starter: int | None, stacks: TextIO, over: threading.Event) -> None:
    told: Beat | None = None
    while not over.wait(ROUND):
        if starter is not None and os.getppid() != starter:
            os._exit(ORPHANED)
        beat, still = heart.last, heart.still_for()
        if limits.timeout:
            faulthandler.dump_traceback_later(max(limits.timeout - still, 0) + SPARE, exit=True, file=stacks)
        if limits.timeout and still > limits.timeout:
            _write_stacks(beat, still, stacks)
            heart.beat(beat.step, f"{FAILED}{beat.phase}")
            _say_and_end(beat, limits.timeout, stacks.name)
        if limits.warning and still > limits.warning and beat is not told:
            told = beat
            _write_stacks(beat, still, stacks)
            log.warning("%s for %.0f s: what it does is written in %s.", str(beat).capitalize(), still, stacks.name)
            tell_stall(heart.directory, beat.step, beat.phase, still, stacks.name)


def _write_stacks(beat: Beat, still: float, stacks: TextIO) -> None:
    stacks.write(f"\n--- {beat} for {still:.0f} s\n")
    stacks.flush()
    faulthandler.dump_traceback(stacks, all_threads=True)
    if threading.active_count() >= MOST_STACKS:
        stacks.write(_main_stack())
        stacks.flush()


def _main_stack() -> str:
    """The main thread as faulthandler writes it: it comes last, and behind many others not at all."""
    frames = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    calls = [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}\n' for frame in reversed(frames)]
    return "".join([f"\nThread 0x{threading.main_thread().ident:016x} (most recent call first):\n", *calls])


def _say_and_end(beat: Beat, timeout: float, where: str) -> None:
    with contextlib.suppress(OSError):
        os.write(
            2,
            f"strop: error: {str(beat).capitalize()} for more than trainer.phase_timeout={timeout:g} s. The stacks of all its "
            f"threads are in {where}.\n".encode(),
        )
    os._exit(HUNG)
