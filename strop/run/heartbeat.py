"""Where each worker of a run is: `workers/rank_N.json` in the run's folder, rewritten whenever its phase changes.

    {"rank": 1, "world": 4, "host": "node7", "pid": 4711, "step": 12, "phase": "gen", "since": 1767225600.0}

A worker that gets SIGUSR1 adds the stacks of all its threads to `workers/rank_N.stacks`, even when Python itself is stuck.
`since` is the time in seconds at which the phase began. After the run, the phase is `finished` or `failed in PHASE`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

STARTING, BETWEEN, FINISHED, FAILED = "starting", "between phases", "finished", "failed in "
"""Phases that are not phases of a step; the last is the beginning of one."""


@dataclass(frozen=True)
class Beat:
    """What a worker last said of itself."""

    rank: int
    world: int
    host: str
    pid: int
    step: int
    phase: str
    since: float

    @property
    def over(self) -> bool:
        return self.phase == FINISHED or self.failed

    @property
    def failed(self) -> bool:
        return self.phase.startswith(FAILED)

    def __str__(self) -> str:
        phase = self.phase.removeprefix(FAILED)
        return f"rank {self.rank} (host {self.host}, process {self.pid}) in phase {phase!r} of step {self.step}"


def workers_of(directory: Path) -> Path:
    return directory / "workers"


def stacks_of(directory: Path, rank: int) -> Path:
    return workers_of(directory) / f"rank_{rank}.stacks"


def log_of(directory: Path, rank: int) -> Path:
    """What a worker wrote to stderr, where somebody started it as one of many."""
    return workers_of(directory) / f"rank_{rank}.log"


def read_beats(directory: Path) -> list[Beat]:
    """The last beats of all workers of a run, by rank; files that cannot be read are left out."""
    found = []
    for path in workers_of(directory).glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Beat(**json.loads(path.read_text())))
    return sorted(found, key=lambda beat: beat.rank)


class Heartbeat:
    def __init__(self, directory: Path, rank: int = 0, world: int = 1) -> None:
        self.directory = directory
        self.last = Beat(rank, world, socket.gethostname(), os.getpid(), 0, STARTING, time.time())
        self._path = workers_of(directory) / f"rank_{rank}.json"
        self._moved = time.monotonic()
        self._told = False

    def still_for(self) -> float:
        """Seconds since this worker came to its phase, by a clock that nobody sets."""
        return time.monotonic() - self._moved

    def beat(self, step: int, phase: str) -> None:
        """This worker has come to a phase. A file that cannot be written is no reason to end a run."""
        self.last = Beat(self.last.rank, self.last.world, self.last.host, self.last.pid, step, phase, time.time())
        self._moved = time.monotonic()
        aside = self._path.with_name(f".{self._path.name}.new")
        try:
            aside.write_text(json.dumps(asdict(self.last)))
            aside.replace(self._path)
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning("Cannot write %s (%s): `strop doctor` will not see this worker move.", self._path, error)

    def _clear_strangers(self) -> None:
        """Remove what workers of a larger run left here."""
        for beat in read_beats(self.directory):
            if beat.rank >= self.last.world:
                for path in workers_of(self.directory).glob(f"rank_{beat.rank}.*"):
                    path.unlink(missing_ok=True)


_beating: list[Heartbeat] = []
"""Of this process: a signal and a process number are of the whole process, too."""


@contextlib.contextmanager
def beating(directory: Path, rank: int = 0, world: int = 1) -> Iterator[Heartbeat]:
    """Inside the block this process says where it is. A block within one of the same run shares its heartbeat."""
    if _beating and (_beating[-1].directory, _beating[-1].last.rank) == (directory, rank):
        yield _beating[-1]
        return
    heart = Heartbeat(directory, rank, world)
    with contextlib.suppress(OSError):  # `beat` tells of it
        workers_of(directory).mkdir(parents=True, exist_ok=True)
        if rank == 0:
            heart._clear_strangers()
    heart.beat(0, STARTING)
    _beating.append(heart)
    try:
        with _stacks_on_signal(stacks_of(directory, rank)):
            yield heart
    except BaseException:
        heart.beat(heart.last.step, f"{FAILED}{heart.last.phase}")
        raise
    else:
        heart.beat(heart.last.step, FINISHED)
    finally:
        _beating.remove(heart)


@contextlib.contextmanager
def _stacks_on_signal(path: Path) -> Iterator[None]:
    try:
        file = path.open("a")
    except OSError:
        yield
        return
    with file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)
