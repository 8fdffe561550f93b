"""Which processes belong to the program of an episode.

A program is given a mark in its environment, which its children inherit, also those that leave its session
and process group. The kernel shows the environment that a process was started with in /proc, so the mark is
found wherever /proc is (Linux). A program that starts others with an empty environment hides them.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "STROP_EPISODE"
PROC = Path("/proc")
_PASSES = 5
"""A process that is killed may have started another one at the same moment."""


def new_mark() -> str:
    return secrets.token_hex(16)


def kill_marked(mark: str) -> int:
    """Kill every process with this mark; how many there were."""
    killed: set[int] = set()
    for _ in range(_PASSES):
        found = [pid for pid in _processes() if pid not in killed and mark_of(pid) == mark]
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
    return len(killed)


def mark_of(pid: int) -> str | None:
    """Return the mark of a process; None where it has none or cannot be seen."""
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    for entry in environment.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == MARK.encode():
            return value.decode("latin-1")
    return None


class ConnectionOwners:
    """Finds the marks of the processes behind connections of this machine."""

    def __init__(self) -> None:
        self._likely: dict[str, int] = {}
        """By mark, a process that had a connection: others of the same program are looked for there first."""

    def mark(self, client_port: int, server_port: int, expected: str) -> str | None:
        """Return the mark of the process that has this connection; None where that cannot be seen: a
        container, another machine, a process without a mark."""
        inode = _socket_inode(client_port, server_port)
        if inode is None:
            return None
        link = f"socket:[{inode}]"
        likely = self._likely.get(expected)
        if likely is not None and link in _open_files(likely):
            return expected
        for pid in _processes():
            if pid != os.getpid() and link in _open_files(pid):
                mark = mark_of(pid)
                if mark is not None:
                    self._likely[mark] = pid
                return mark
        return None

    def forget(self, mark: str) -> None:
        """The program of this mark has ended."""
        self._likely.pop(mark, None)


def _socket_inode(client_port: int, server_port: int) -> str | None:
    """Return the inode of the client's end of a connection."""
    ends = rf":{client_port:04X} [0-9A-F]+:{server_port:04X} \S+ \S+ \S+ \S+ +\d+ +\d+ (\d+)"
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            found = re.search(ends, (PROC / "net" / name).read_text())
            if found is not None:
                return found[1]
    return None


def _processes() -> Iterator[int]:
    with suppress(OSError):
        for name in os.listdir(PROC):
            if name.isdigit():
                yield int(name)


def _open_files(pid: int) -> set[str]:
    folder = PROC / str(pid) / "fd"
    found = set()
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                found.add(os.readlink(folder / name))
    return found
