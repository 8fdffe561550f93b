"""Watch the processes of a program: their output, time and memory, and the files that they write."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import stat
import time
from collections.abc import Iterable, Mapping

from strop.rewards.sandbox.cgroup import Membership
from strop.rewards.sandbox.work_folder import BLOCK, exceeds_disk

CHECK_INTERVAL = 0.05  # seconds between checks of the memory of all processes
MAX_FILES = 1024  # to remove one takes milliseconds on some file systems
Limits = Mapping[str, int]
"""The fields of `SandboxLimits`."""


class ProcessWatch:
    """Reads the output of a process until it ends, or exceeds its time, output, memory or disk limit."""

    def __init__(
        self,
        child: int,
        pipes: Mapping[int, str],
        limits: Limits,
        *,
        group: Membership | None = None,
        folder: str | None = None,
    ):
        """`group`: the control group of the program; `folder`: its files, if no file system limits them."""
        self.child = child
        self.pipes = dict(pipes)
        self.limits = limits
        self.group = group
        self.folder = folder
        self.output: dict[str, bytearray] = {name: bytearray() for name in pipes.values()}
        self.exit_code: int | None = None

    def until(self, deadline: float) -> str:
        """Watch the process and return its status."""
        ended = os.pidfd_open(self.child)
        poll = select.poll()
        for descriptor in (ended, *self.pipes):
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
        try:
            return self._watch(poll, ended, deadline)
        finally:
            for descriptor in (ended, *self.pipes):
                os.close(descriptor)

    def _watch(self, poll: select.poll, ended: int, deadline: float) -> str:
        next_check = time.monotonic() + CHECK_INTERVAL
        while True:
            now = time.monotonic()
            remaining = deadline - now
            if remaining <= 0:
                return "timeout"
            if now > next_check:
                exceeded = self._exceeded()
                if exceeded:
                    return exceeded
                next_check = time.monotonic() + CHECK_INTERVAL
            ready = dict(poll.poll(min(remaining, CHECK_INTERVAL) * 1000 + 1))
            for descriptor in ready:
                if descriptor != ended and not self._read(descriptor):
                    poll.unregister(descriptor)
            if self._has_too_much_output():
                return "output"
            if ended in ready:
                return self._finish()

    def _exceeded(self) -> str:
        """Return which limit the processes exceed together; empty if none."""
        if self.group is not None and self.group.ran_out():
            return "memory"
        pids = descendants()
        if total_memory(pids) > self.limits["memory_mb"] << 20:
            return "memory"
        if self.folder is not None:
            limit = self.limits["disk_mb"] << 20
            if exceeds_disk(self.folder, limit, MAX_FILES) or deleted_files(pids) > limit:
                return "disk"
        return ""

    def _finish(self) -> str:
        _, status = os.waitpid(self.child, 0)
        self.exit_code = os.waitstatus_to_exitcode(status)
        if self.group is not None and self.group.ran_out():
            return "memory"
        for descriptor in self.pipes:  # read the rest; other processes that hold the pipe are not waited for
            os.set_blocking(descriptor, False)
            while self._read(descriptor):
                if self._has_too_much_output():
                    return "output"
        if self.exit_code == -signal.SIGXCPU:
            return "timeout"
        if self.exit_code == 0:
            return "ok"
        return "error"

    def _has_too_much_output(self) -> bool:
        return max(map(len, self.output.values())) > self.limits["output_bytes"]

    def _read(self, descriptor: int) -> bool:
        """Read from a pipe; False at its end, or if there is nothing to read."""
        try:
            chunk = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        self.output[self.pipes[descriptor]] += chunk
        return bool(chunk)

    def texts(self) -> dict[str, str]:
        """Return the decoded output of each pipe."""
        limit = self.limits["output_bytes"]
        return {name: bytes(data[:limit]).decode("utf-8", "replace") for name, data in self.output.items()}


def descendants() -> list[int]:
    """Return all descendant processes; orphans are children of this process, because it is a subreaper."""
    parents: dict[int, int] = {}
    for name in _processes():
        if name.isdigit():
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(f"/proc/{name}/stat", "rb") as file,
            ):
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def _processes() -> list[str]:
    """Return the names of /proc, which is empty where it cannot be mounted."""
    with contextlib.suppress(OSError):
        return os.listdir("/proc")
    return []


def total_memory(pids: Iterable[int]) -> int:
    """Return the resident memory of processes in bytes; rlimits hold for one process only."""
    pages = 0
    for pid in pids:
        with (
            contextlib.suppress(OSError, IndexError, ValueError),
            open(f"/proc/{pid}/statm", "rb") as file,
        ):
            pages += int(file.read().split()[1])
    return pages * resource.getpagesize()


def deleted_files(pids: Iterable[int]) -> int:
    """Return the size in bytes of the files that processes hold open and that have no name any more."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        for path in _open_files(pid):
            with contextlib.suppress(OSError):
                state = os.stat(path)
                if stat.S_ISREG(state.st_mode) and state.st_nlink == 0:
                    sizes[state.st_dev, state.st_ino] = state.st_blocks * BLOCK
    return sum(sizes.values())


def _open_files(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    return []


def tasks_of_this_user() -> int:
    """Return the number of threads that count against the process limit of this user."""
    user = str(os.getuid())
    tasks = 0
    for name in _processes():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/status", encoding="utf-8") as file:
                fields = dict(line.split(":", 1) for line in file if ":" in line)
                if fields["Uid"].split()[0] == user:
                    tasks += int(fields["Threads"])
    return max(tasks, 2)
