"""The heartbeat of each worker, `workers/rank_N.json` in the run's folder, and the lock of that folder.

The heartbeat is rewritten whenever the phase of a worker changes:

    {"rank": 1, "world": 4, "host": "node7", "pid": 4711, "step": 12, "phase": "gen", "since": 1767225600.0}

`since` is the Unix time at which the phase began. In a long phase the watchdog touches the file. After the
run, the phase is `finished`, `stopped` (by a signal) or `failed in PHASE`. A worker that gets SIGUSR1 appends
the stacks of all its threads to `workers/rank_N.stacks`, even when Python itself is stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from strop.stopping import requested

log = logging.getLogger(__name__)

# Phases that are not phases of a step; FAILED is a prefix.
STARTING = "starting"
BETWEEN_PHASES = "between phases"
FINISHED = "finished"
STOPPED_BY_SIGNAL = "stopped"
FAILED = "failed in "


@dataclass(frozen=True)
class WorkerState:
    """The last heartbeat of a worker."""

    rank: int
    world: int
    host: str
    pid: int
    step: int
    phase: str
    since: float

    @property
    def over(self) -> bool:
        return self.phase in (FINISHED, STOPPED_BY_SIGNAL) or self.failed

    @property
    def failed(self) -> bool:
        return self.phase.startswith(FAILED)

    def __str__(self) -> str:
        phase = self.phase.removeprefix(FAILED)
        return (
            f"rank {self.rank} (host {self.host}, process {self.pid}) in phase {phase!r} of step {self.step}"
        )


def workers_folder(directory: Path) -> Path:
    """The folder of heartbeats, stacks and logs in a run's folder."""
    return directory / "workers"


def stacks_file(directory: Path, rank: int) -> Path:
    return workers_folder(directory) / f"rank_{rank}.stacks"


def worker_log_file(directory: Path, rank: int) -> Path:
    """What a worker wrote to stderr, where it was started as one of many."""
    return workers_folder(directory) / f"rank_{rank}.log"


def read_worker_states(directory: Path) -> list[WorkerState]:
    """The last heartbeats of all workers of a run, by rank; files that no worker writes are left out."""
    found = []
    for path in filter(Path.is_file, workers_folder(directory).glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            found.append(_parsed(json.loads(path.read_text())))
    return sorted(found, key=lambda worker: worker.rank)


def lock_file(directory: Path) -> Path:
    """It is made before the first heartbeat, and stays as it is."""
    return workers_folder(directory) / "lock"


def last_sign_of_life(directory: Path) -> float:
    """The Unix time at which a worker of a run last wrote or touched its heartbeat; 0 if there is none.

    A lock that is younger than every heartbeat's own time was copied with the folder. Then the times of the
    files are those of the copy, and do not count.
    """
    signs = [0.0]
    for path in workers_folder(directory).glob("rank_*.json"):
        with contextlib.suppress(OSError):
            signs.append(path.stat().st_mtime)
    began = [worker.since for worker in read_worker_states(directory)]
    with contextlib.suppress(OSError):
        if began and lock_file(directory).stat().st_mtime > max(began):
            return max(began)
    return max(signs)


def _parsed(values: Mapping[str, Any]) -> WorkerState:
    """A heartbeat, if every value has the type of what `beat` writes."""
    kinds = {"rank": int, "world": int, "host": str, "pid": int, "step": int, "phase": str, "since": float}
    for name, kind in kinds.items():
        if type(values.get(name)) is not kind:
            raise TypeError(f"{name} is no {kind.__name__}")
    return WorkerState(**values)


class Heartbeat:
    """Writes the phase of this worker."""

    def __init__(self, directory: Path, rank: int = 0, world: int = 1) -> None:
        self.directory = directory
        self.last = WorkerState(rank, world, socket.gethostname(), os.getpid(), 0, STARTING, time.time())
        self._path = workers_folder(directory) / f"rank_{rank}.json"
        self._phase_start = time.monotonic()
        self._warned = False

    def seconds_in_phase(self) -> float:
        """Seconds since this worker entered its phase, by the monotonic clock."""
        return time.monotonic() - self._phase_start

    def beat(self, step: int, phase: str | None) -> None:
        """Record that this worker entered a phase, or (None) left one. A file that cannot be written does not
        stop a run."""
        self.last = replace(self.last, step=step, phase=phase or BETWEEN_PHASES, since=time.time())
        self._phase_start = time.monotonic()
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            temporary.write_text(json.dumps(asdict(self.last)))
            temporary.replace(self._path)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "Cannot write %s (%s): `strop doctor` will not see this worker move.", self._path, error
                )

    def touch(self) -> None:
        """Record that this worker is alive in the same phase."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def _remove_old_ranks(self) -> None:
        """Remove files of ranks that an earlier, larger run left here."""
        for worker in read_worker_states(self.directory):
            if worker.rank >= self.last.world:
                for path in workers_folder(self.directory).glob(f"rank_{worker.rank}.*"):
                    path.unlink(missing_ok=True)


_active: list[Heartbeat] = []
"""The heartbeats of this process; the signal handler, too, belongs to the whole process."""


@contextlib.contextmanager
def start_heartbeat(directory: Path, rank: int = 0, world: int = 1) -> Iterator[Heartbeat]:
    """Write heartbeats inside the block. A nested block of the same run shares the heartbeat."""
    if _active and _active[-1].directory == directory and _active[-1].last.rank == rank:
        yield _active[-1]
        return
    heart = Heartbeat(directory, rank, world)
    with contextlib.suppress(OSError):  # `beat` logs it
        workers_folder(directory).mkdir(parents=True, exist_ok=True)
        if rank == 0:
            heart._remove_old_ranks()
    heart.beat(0, STARTING)
    _active.append(heart)
    try:
        with _stacks_on_signal(stacks_file(directory, rank)):
            yield heart
    except BaseException:
        heart.beat(heart.last.step, f"{FAILED}{heart.last.phase}")
        raise
    else:
        heart.beat(heart.last.step, FINISHED if requested() is None else STOPPED_BY_SIGNAL)
    finally:
        _active.remove(heart)


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


@contextlib.contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Lock the folder of a run; a ValueError if another process holds the lock.

    Two runs in one folder would resume from each other's checkpoints and mix their metrics. The kernel
    releases the lock when this process ends, however it ends; child processes do not inherit it.
    """
    path = lock_file(directory)
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.lockf(held.enter_context(path.open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            active = [worker for worker in read_worker_states(directory) if not worker.over]
            who = f" ({active[0]})" if active else ""
            raise ValueError(
                f"trainer.default_local_dir={directory} belongs to a run that has not ended{who}. Set "
                "trainer.experiment_name or trainer.default_local_dir to something of its own, or end that "
                f"run. (If there is none, delete {path}.)"
            ) from error
        except OSError:
            pass  # a file system without locks, or a folder that is not writable, which is reported elsewhere
        yield
