"""The ranks of a run on a cluster: a launcher for each, and the driver's watcher of all launchers.

A launcher is a small actor that starts the rank as a subprocess and watches it. The subprocess is the same as
with `runtime/local.py`, so the rank itself knows nothing of the cluster. When the rank dies, the actor stays
on the machine and reports the exit code. The watcher waits until all ranks have ended and finds the rank that
failed first. To import this file imports neither Ray nor torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast

from strop.run.heartbeat import worker_log_file
from strop.runtime.failure import MACHINE_LOST, RankFailure, first_cause
from strop.runtime.launch import (
    LAUNCHED,
    OutputTail,
    enter_folder,
    free_port,
    network_environment,
    omp_threads_per_rank,
)
from strop.runtime.ray.connection import (
    HEAD_TIMEOUT,
    ActorHandle,
    ClusterHead,
    ClusterLost,
    ObjectRef,
    short_error,
)
from strop.stopping import SignalLog

PACKAGES = ("strop", "torch", "transformers")
"""Packages whose versions must be the same on all machines."""
GRACE_SECONDS = 10.0
MAX_BUFFERED_LINES = 1000
"""Output lines that are kept until the driver fetches them; it fetches only those of rank 0."""
STDOUT = 1
STDERR = 2
POLL_SECONDS = 0.5
PEER_GRACE_SECONDS = 15.0
"""Seconds that the other ranks have to end by themselves after one has failed."""
OUTPUT_TIMEOUT = 60.0
"""Seconds in which a launcher must return the output of its rank."""


@dataclass(frozen=True)
class Machine:
    """What a launcher finds on its machine."""

    host: str
    address: str
    pid: int
    versions: Mapping[str, str]
    missing: Sequence[str] = ()
    """Paths of the configuration that do not exist here."""


@dataclass(frozen=True)
class EndedProcess:
    code: int
    lines: tuple[str, ...]
    """The last lines of stderr."""


@dataclass
class RankLauncher:
    """Starts, watches and stops one rank. It runs as a Ray actor with several concurrent calls."""

    rank: int
    process: subprocess.Popen[bytes] | None = None
    _buffered: list[tuple[int, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def machine(self, address: str, folder: str, paths: Sequence[str]) -> Machine:
        """Change to `folder`, where relative paths begin, and describe this machine."""
        enter_folder(folder)
        missing = [path for path in paths if not os.path.exists(os.path.expanduser(path))]
        return Machine(socket.gethostname(), address, os.getpid(), package_versions(), missing)

    def free_port(self) -> int:
        """Return a free port of this machine, for MASTER_PORT."""
        return free_port()

    def run(
        self,
        program: str,
        arguments: Sequence[str],
        address: str,
        directory: str,
        environment: Mapping[str, str],
    ) -> EndedProcess:
        """Start the rank and wait until it ends."""
        with sigint_unblocked():
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, *arguments],
                env={
                    **os.environ,
                    **thread_environment(environment),
                    **network_environment(address),
                    **environment,
                    LAUNCHED: str(os.getpid()),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        stdout = OutputTail(cast(BinaryIO, self.process.stdout), lambda line: self._buffer(STDOUT, line))
        stderr = OutputTail(
            cast(BinaryIO, self.process.stderr),
            lambda line: self._buffer(STDERR, line),
            worker_log_file(Path(directory), self.rank),
        )
        code = self.process.wait()
        stdout.last_lines()
        return EndedProcess(code, stderr.last_lines())

    def _buffer(self, stream: int, line: str) -> None:
        with self._lock:
            self._buffered.append((stream, line))
            del self._buffered[:-MAX_BUFFERED_LINES]

    def take_output(self) -> list[tuple[int, str]]:
        """Return what the rank wrote since the last call: (STDOUT or STDERR, line)."""
        with self._lock:
            lines = self._buffered
            self._buffered = []
            return lines

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the rank, which ends by itself."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal_number)

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """Send a signal to the rank; kill it when it does not end in time."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal_number)
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def sigint_unblocked() -> Iterator[None]:
    """Around the start of a process. Ray's workers block SIGINT, and a child inherits what its parent blocks:
    Ctrl-C would never reach it."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES on this machine."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def thread_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS as on a machine without Ray. Ray itself would give each rank one thread."""
    return {"OMP_NUM_THREADS": omp_threads_per_rank(int(environment["LOCAL_WORLD_SIZE"]))}


class RankWatcher:
    """The ranks of one attempt, in the order of their numbers."""

    def __init__(
        self,
        ray: ModuleType,
        launchers: Sequence[ActorHandle],
        machines: Sequence[Machine],
        runs: Sequence[ObjectRef],
        grace: float = 0.0,
    ) -> None:
        """`runs`: the running calls of `RankLauncher.run`. `grace`: the seconds that ranks may take to end
        after a signal."""
        self._grace = grace
        self._ray = ray
        self._launchers = launchers
        self._machines = machines
        self._runs = runs
        self._world_size = len(runs)
        self._ended: dict[int, EndedProcess] = {}
        self._details: dict[int, str] = {}
        """What Ray says about ranks that were lost with their machine."""

    def watch(self) -> RankFailure | None:
        """Wait for all ranks; the failure that came first, or None.

        After a failure, the other ranks have PEER_GRACE_SECONDS to end; then they are stopped. After a
        signal to this process all ranks have the grace period too; a second signal stops them.
        """
        head = ClusterHead(self._ray.get_runtime_context().gcs_address)
        deadline = math.inf
        with collect_signals() as signals:
            while len(self._ended) < self._world_size and time.monotonic() < deadline:
                running = {run: rank for rank, run in enumerate(self._runs) if rank not in self._ended}
                done, _ = self._ray.wait(list(running), num_returns=len(running), timeout=POLL_SECONDS)
                self._check_head(head)  # before other calls, which would wait for a lost head
                lead_was_running = 0 not in self._ended
                for run in done:
                    self._record_end(running[run], run)
                if lead_was_running:
                    self._show_output()
                failed = any(end.code for end in self._ended.values())
                if deadline == math.inf and signals:
                    deadline = time.monotonic() + self._grace + PEER_GRACE_SECONDS
                    self._forward(signals[0])
                if deadline == math.inf and failed:
                    deadline = time.monotonic() + PEER_GRACE_SECONDS
                if len(signals) > 1:
                    self._stop(signal.SIGKILL)
                    break
            self._stop(signal.SIGTERM)
        return self._failure(signals)

    def _record_end(self, rank: int, run: ObjectRef) -> None:
        try:
            self._ended[rank] = self._ray.get(run)
            self._details[rank] = ""
        except self._ray.exceptions.RayError as error:
            self._ended[rank] = EndedProcess(MACHINE_LOST, ())
            self._details[rank] = short_error(error)

    def _check_head(self, head: ClusterHead) -> None:
        if head.silent_for() <= HEAD_TIMEOUT:
            return
        self._stop(signal.SIGTERM)
        raise ClusterLost(
            f"The head of the Ray cluster at {head.address} does not answer any more, so the ranks were "
            "stopped. Start the cluster again; the same command then resumes from the last checkpoint."
        )

    def _show_output(self) -> None:
        """Print what rank 0 wrote."""
        try:
            lines = self._ray.get(self._launchers[0].take_output.remote(), timeout=OUTPUT_TIMEOUT)
        except self._ray.exceptions.RayError:
            return  # the end of its run says what happened
        for stream, line in lines:
            target = sys.stdout if stream == STDOUT else sys.stderr
            with contextlib.suppress(OSError):  # a full disk or a closed terminal must not end the run
                target.write(line)
                target.flush()

    def _forward(self, signal_number: int) -> None:
        for rank, launcher in enumerate(self._launchers):
            if rank not in self._ended:
                launcher.send_signal.remote(signal_number)

    def _stop(self, signal_number: int) -> None:
        """Stop the ranks that still run."""
        stopping = []
        for rank, launcher in enumerate(self._launchers):
            if rank not in self._ended:
                stopping.append(launcher.stop.remote(signal_number))
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=PEER_GRACE_SECONDS)

    def _failure(self, signals: Sequence[int]) -> RankFailure | None:
        codes = {rank: end.code for rank, end in self._ended.items() if end.code}
        if not codes and len(self._ended) == self._world_size:
            return None
        if not codes:
            return RankFailure(0, self._world_size, -signals[0], interrupted=True)
        cause = first_cause(codes)
        return RankFailure(
            cause,
            self._world_size,
            codes[cause],
            self._machines[cause].host,
            self._ended[cause].lines,
            detail=self._details[cause],
            interrupted=bool(signals),
            shown=cause == 0,
        )


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Yield the list of SIGINT and SIGTERM that arrive in the block; Ray's own handlers would leave ranks
    running."""
    received = SignalLog()

    def receive(number: int, _: object) -> None:
        received.add(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received.numbers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
