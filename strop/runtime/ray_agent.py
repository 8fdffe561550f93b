"""One rank of a run on a machine of a cluster: a small actor that starts the rank as a process of its own and watches it.

The rank is the very process that `runtime/local.py` would start, so nothing of a cluster is in its way, and when it dies there
is somebody left on its machine to say how. This file knows nothing of Ray, and does not import torch.
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

from strop.run.heartbeat import log_of
from strop.runtime.tail import Tail

PACKAGES = ("strop", "torch", "transformers")
GRACE = 10.0
MOST_NEWS = 1000
"""Lines that wait to be fetched; the agents of most ranks are never asked."""
LAUNCHED = "STROP_LAUNCHED"
"""Set for ranks whose starter has made the preflight: its process number, since ranks end when it is gone."""


@dataclass(frozen=True)
class Machine:
    """What an agent finds where it was put."""

    host: str
    address: str
    pid: int
    versions: Mapping[str, str]
    missing: Sequence[str] = ()
    """Paths of the configuration that are not here."""


@dataclass(frozen=True)
class Ended:
    code: int
    lines: tuple[str, ...]


@dataclass
class Agent:
    rank: int
    process: subprocess.Popen[bytes] | None = None
    _news: list[tuple[int, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def machine(self, address: str, folder: str, paths: Sequence[str]) -> Machine:
        """Go to `folder`, where relative paths begin, and look for `paths` there."""
        with contextlib.suppress(OSError):  # the paths that are then missing are what counts
            os.chdir(folder)
        missing = [path for path in paths if not os.path.exists(os.path.expanduser(path))]
        return Machine(socket.gethostname(), address, os.getpid(), versions(), missing)

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def run(
        self, program: str, arguments: Sequence[str], address: str, directory: str, environment: Mapping[str, str]
    ) -> Ended:
        """Start the rank and wait for its end."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            env={**os.environ, **threads(environment), **network(address), **environment, LAUNCHED: str(os.getpid())},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        said = Tail(cast(BinaryIO, self.process.stdout), lambda line: self._hear(1, line))
        tail = Tail(cast(BinaryIO, self.process.stderr), lambda line: self._hear(2, line), log_of(Path(directory), self.rank))
        code = self.process.wait()
        said.last()
        return Ended(code, tail.last())

    def _hear(self, stream: int, line: str) -> None:
        with self._lock:
            self._news.append((stream, line))
            del self._news[:-MOST_NEWS]

    def news(self) -> list[tuple[int, str]]:
        """What the rank has written since this was last asked: 1 for stdout or 2 for stderr, and a line."""
        with self._lock:
            news, self._news = self._news, []
            return news

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Tell the rank to end; one that does not is killed."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(number)
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Processors shared by the ranks of a machine, as on a machine without Ray; Ray itself would give each of them one."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // int(environment["LOCAL_WORLD_SIZE"])))}


def network(address: str) -> dict[str, str]:
    """gloo and NCCL must use the interface by which machines of the cluster know each other; a host's name may mean another."""
    name = interface_of(address)
    if name is None:
        return {}
    return {key: name for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if key not in os.environ}


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = name[:15].encode().ljust(256, b"\0")
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
