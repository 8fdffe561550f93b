"""A control group that limits the memory of a program: all its processes, files in memory and pipes.

It is used where this process may create one (version 2 with a delegated group, or version 1). Elsewhere the
limits of `resource`, the sum of resident memory and the seccomp filter have to do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

_SLACK_MB = 16  # page tables, stacks of the kernel
_REMOVAL_SECONDS = 1.0  # how long the kernel may take to forget killed processes
_numbers = itertools.count()


@contextlib.contextmanager
def memory_group(megabytes: int) -> Iterator[str | None]:
    """Yield the folder of a new group with this limit; None where none can be created."""
    group = _create(megabytes)
    try:
        yield group
    finally:
        if group is not None:
            _remove(group)


def _create(megabytes: int) -> str | None:
    for parent in _parents():
        group = parent / f"strop-sandbox-{os.getpid()}-{next(_numbers)}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            _limit(group, (megabytes + _SLACK_MB) << 20)
        except OSError:
            _remove(str(group))
            continue
        return str(group)
    return None


def _limit(group: Path, size: int) -> None:
    if (group / "memory.max").exists():
        (group / "memory.max").write_text(str(size))
        optional = {"memory.swap.max": "0", "memory.oom.group": "1"}
    else:
        (group / "memory.limit_in_bytes").write_text(str(size))
        optional = {"memory.memsw.limit_in_bytes": str(size)}
    for name, value in optional.items():
        with contextlib.suppress(OSError):  # kernels without accounting of swap
            (group / name).write_text(value)
    if not os.access(group / "cgroup.procs", os.W_OK):
        raise PermissionError("processes cannot be moved to the group")


def _remove(group: str) -> None:
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while True:
        try:
            os.rmdir(group)
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        else:
            return


def _parents() -> list[Path]:
    """Return the groups below which a group with a memory limit may be created, the best first."""
    try:
        own = Path("/proc/self/cgroup").read_text()
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return []
    return parent_groups(own, mounts)


def parent_groups(own: str, mounts: str) -> list[Path]:
    """Return the folders of this process's memory groups; `own` and `mounts` are texts of /proc.

    In version 2 a group with processes cannot have groups with limits below it, so the parent is tried too.
    """
    found: list[Path] = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        for mount, is_version_2 in _memory_mounts(mounts, bool(controllers)):
            folder = mount / path.lstrip("/")
            if controllers and "memory" in controllers.split(","):
                found.append(folder)
            elif not controllers and is_version_2:
                found += [group for group in (folder, folder.parent) if _passes_memory_on(group)]
    return found


def _memory_mounts(mounts: str, version_1: bool) -> Iterator[tuple[Path, bool]]:
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        mount = Path(left.split(" ")[4])
        if version_1 and kind == "cgroup" and "memory" in options.split(","):
            yield mount, False
        elif not version_1 and kind == "cgroup2":
            yield mount, True


def _passes_memory_on(group: Path) -> bool:
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


class Membership:
    """A group as the supervisor inside the sandbox has it: descriptors, which a new root does not close."""

    def __init__(self, group: str):
        self._members = os.open(f"{group}/cgroup.procs", os.O_WRONLY)
        events = f"{group}/memory.events"
        if not os.path.exists(events):
            events = f"{group}/memory.oom_control"
        self._events = os.open(events, os.O_RDONLY)
        self._seen = self._kills()

    def join(self) -> None:
        """Move this process into the group."""
        os.write(self._members, b"0")

    def ran_out(self) -> bool:
        """Whether the kernel killed a process of the group since the last call that returned True."""
        kills = self._kills()
        if kills == self._seen:
            return False
        self._seen = kills
        return True

    def _kills(self) -> int:
        for line in os.pread(self._events, 4096, 0).decode().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return 0
