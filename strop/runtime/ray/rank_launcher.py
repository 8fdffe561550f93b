"""One rank on a machine of the cluster: a small actor that starts the rank as a subprocess and watches it.

The subprocess is the same as with `runtime/local.py`, so the rank itself knows nothing of the cluster. When
the rank dies, the actor stays on the machine and reports the exit code. This file imports neither Ray nor
torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO, cast

from strop.run.heartbeat import worker_log_file
from strop.runtime.child_process import LAUNCHED, OutputTail, omp_threads_per_rank
from strop.runtime.network import free_port, network_environment

PACKAGES = ("strop", "torch", "transformers")
"""Packages whose versions must be the same on all machines."""
GRACE_SECONDS = 10.0
MAX_BUFFERED_LINES = 1000
"""Output lines that are kept until the driver fetches them; it fetches only those of rank 0."""
STDOUT = 1
STDERR = 2


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
        with contextlib.suppress(OSError):  # paths that are missing then are reported below
            os.chdir(folder)
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

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """Send a signal to the rank; kill it when it does not end in time."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal_number)
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()


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
