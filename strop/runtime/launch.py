"""What everything that starts or connects processes uses: ports, network interfaces, the environment and
the output of a rank.

Used for local ranks, ranks on a Ray cluster, training workers and the group that broadcasts weights. This
file imports neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from strop.host import usable_cores

SIOCGIFADDR = 0x8915
"""Number of the Linux system call that returns the IPv4 address of an interface."""
LAUNCHED = "STROP_LAUNCHED"
"""Environment variable with the process id of the launcher. It is set for ranks whose launcher has run the
preflight; these ranks exit when the launcher is gone."""
TAIL_LINES = 20
"""Output lines that are kept for error messages."""


def enter_folder(folder: str) -> None:
    """Change to `folder`, where the relative paths of the command begin. One that this machine does not have
    is left out: a path that is missing then is reported with its key."""
    with contextlib.suppress(OSError):
        os.chdir(folder)


def torchrun_sizes() -> list[str]:
    """Return what torchrun started as settings; empty in other processes, and in ranks that Strop started."""
    if "WORLD_SIZE" not in os.environ or "LOCAL_WORLD_SIZE" not in os.environ or LAUNCHED in os.environ:
        return []
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return [f"trainer.nnodes={int(os.environ['WORLD_SIZE']) // local}", f"trainer.n_gpus_per_node={local}"]


def free_port() -> int:
    """Return a TCP port that no process of this machine uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def address_towards(host: str) -> str:
    """Return the address of this machine on the network that leads to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # UDP: no packet is sent
        return str(probe.getsockname()[0])


def interface_of_address(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address, or None."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                request = name[:15].encode().ljust(256, b"\0")
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


def network_environment(address: str) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the interface of `address`.

    Machines of a cluster know each other by this address; the host name may resolve to another interface.
    Variables that the user has set are left alone.
    """
    name = interface_of_address(address)
    if name is None:
        return {}
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {variable: name for variable in variables if variable not in os.environ}


def omp_threads_per_rank(ranks_on_machine: int) -> str:
    """Return OMP_NUM_THREADS for each rank: the cores that this process may use, divided by the ranks."""
    return str(max(1, usable_cores() // ranks_on_machine))


class OutputTail:
    """Forwards the output of a process line by line and keeps its last lines."""

    def __init__(
        self, pipe: BinaryIO, forward: Callable[[str], object], log_path: Path | None = None
    ) -> None:
        """Read `pipe` to its end in a thread; also write everything to the file `log_path`."""
        self._pipe = pipe
        self._forward = forward
        self._log_path = log_path
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.ExitStack() as stack:
            file = None
            if self._log_path is not None:
                with contextlib.suppress(OSError):  # a missing log file must not end the run
                    self._log_path.parent.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(self._log_path.open("w", errors="replace"))
            for raw in stack.enter_context(self._pipe):
                line = raw.decode(errors="replace")
                self._lines.append(line.rstrip("\n"))
                with contextlib.suppress(OSError):  # a full disk or a closed terminal must not end the run
                    self._forward(line)
                if file is not None:
                    with contextlib.suppress(OSError):
                        file.write(line)
                        file.flush()

    def last_lines(self, timeout: float = 1.0) -> tuple[str, ...]:
        """Return the last lines. The wait is short: children of the process may keep the pipe open."""
        self._thread.join(timeout)
        return tuple(self._lines)
