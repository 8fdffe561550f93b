"""The trusted part inside the walls: runs a program once per test, each time in a fresh process, and reports on all of them.

It knows the inputs of the tests and never the expected outputs, so there is nothing here worth stealing. It reads a request as
JSON from its standard input and writes a report as JSON to its standard output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from strop.rewards.sandbox import walls
from strop.rewards.sandbox.program import Program

LOOK_AFTER = 0.05  # seconds between looks at the memory of everything that runs
OUTPUT, ERRORS, VALUE = "stdout", "stderr", "value"


def main() -> NoReturn:
    """Serve the request and end."""
    walls.die_with_parent()
    report = os.dup(1)
    request = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    try:
        supervisor = Supervisor(request, own_user=_enter(request))
    except OSError as error:
        _end(report, {"broken": f"{type(error).__name__}: {error}"})
    results = []
    for test in request["tests"]:
        left = supervisor.deadline - time.monotonic()
        result = supervisor.run(test, left) if left > 0 else {"status": "not run"}
        results.append(result)
    _end(report, {"results": results})


def _end(report: int, content: Mapping[str, Any]) -> NoReturn:
    with os.fdopen(report, "w", encoding="utf-8") as pipe:
        json.dump(content, pipe)
    os._exit(0)


def _enter(request: Mapping[str, Any]) -> bool:
    """Go behind the walls that the request names; True if programs get a user id of their own."""
    own_user = request["level"] == "user"
    if request["level"] == "namespaces":
        own_user = os.geteuid() == 0
        walls.unshare()
        first = os.fork()
        if first:  # the new namespaces hold for children only
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        walls.die_with_parent()
        walls.build_root(request["folders"], request["limits"]["disk_mb"])
    else:
        walls.become_reaper()
        os.chdir(request["work"])
        if own_user:
            os.chown(".", request["user"], request["user"])
    walls.set_inspectable(False)
    return own_user


class Supervisor:
    def __init__(self, request: Mapping[str, Any], own_user: bool):
        self.request, self.limits = request, request["limits"]
        self.user = request["user"] if own_user else None
        self.work = os.getcwd()
        self.deadline = time.monotonic() + self.limits["total_seconds"]
        self.is_first = os.getpid() == 1
        """Of a process namespace: whatever runs in it is ours."""

    def run(self, test: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """What the program did with one test."""
        pipes = {name: os.pipe() for name in (OUTPUT, ERRORS, VALUE)}
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            self._become_program(pipes, test.get("stdin", ""))
            Program(self.request["program"], test, pipes[VALUE][1], self.request["packages"]).run()
        for _, theirs in pipes.values():
            os.close(theirs)
        watch = Watch(child, {ours: name for name, (ours, _) in pipes.items()}, self.limits)
        status = watch.until(start + min(seconds, self.limits["seconds"]))
        self._kill_everything()
        taken = time.monotonic() - start
        self._clean()
        return {"status": status, "seconds": taken, "exit_code": watch.exit_code, **watch.texts()}

    def _become_program(self, pipes: Mapping[str, tuple[int, int]], stdin: str) -> None:
        os.setsid()
        given = os.memfd_create("stdin")
        with os.fdopen(os.dup(given), "wb") as file:
            file.write(stdin.encode("utf-8", "replace"))
        os.lseek(given, 0, os.SEEK_SET)
        os.dup2(given, 0)
        os.dup2(pipes[OUTPUT][1], 1)
        os.dup2(pipes[ERRORS][1], 2)
        keep = pipes[VALUE][1]
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="replace")
        sys.__stdin__ = sys.stdin  # type: ignore[misc]
        self._set_limits()
        walls.drop_privileges(self.user)
        walls.die_with_parent()

    def _set_limits(self) -> None:
        limits = self.limits
        processes = limits["processes"] + (0 if self.user is not None else _tasks_of_this_user())
        for kind, most in (
            (resource.RLIMIT_AS, limits["memory_mb"] << 20),
            (resource.RLIMIT_FSIZE, limits["disk_mb"] << 20),
            (resource.RLIMIT_NOFILE, limits["open_files"]),
            (resource.RLIMIT_NPROC, processes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, int(limits["seconds"]) + 2),
        ):
            _, ceiling = resource.getrlimit(kind)
            most = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
            resource.setrlimit(kind, (most, most))

    def _kill_everything(self) -> None:
        """Nothing that the program started goes on after it."""
        while True:
            if self.is_first:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for pid in descendants():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def _clean(self) -> None:
        """Every test begins with an empty folder."""
        for name in os.listdir(self.work):
            path = os.path.join(self.work, name)
            if os.path.isdir(path) and not os.path.islink(path):
                import shutil  # slow to load, and rarely needed

                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(path)


class Watch:
    """Reads what a process writes until it ends, is late, writes too much or takes too much memory."""

    def __init__(self, child: int, pipes: Mapping[int, str], limits: Mapping[str, Any]):
        self.child, self.pipes, self.limits = child, dict(pipes), limits
        self.kept: dict[str, bytearray] = {name: bytearray() for name in pipes.values()}
        self.exit_code: int | None = None

    def until(self, deadline: float) -> str:
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
        look = time.monotonic() + LOOK_AFTER
        while True:
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                return "timeout"
            if now > look:
                if memory_of_all() > self.limits["memory_mb"] << 20:
                    return "memory"
                look = now + LOOK_AFTER
            ready = dict(poll.poll(min(left, LOOK_AFTER) * 1000 + 1))
            for descriptor in [d for d in ready if d != ended]:
                if not self._read(descriptor):
                    poll.unregister(descriptor)
            if max(map(len, self.kept.values())) > self.limits["output_bytes"]:
                return "output"
            if ended in ready:
                return self._finish()

    def _finish(self) -> str:
        _, status = os.waitpid(self.child, 0)
        self.exit_code = os.waitstatus_to_exitcode(status)
        for descriptor in self.pipes:  # what is left in the pipes; whoever else still holds them is not waited for
            os.set_blocking(descriptor, False)
            while self._read(descriptor):
                if max(map(len, self.kept.values())) > self.limits["output_bytes"]:
                    return "output"
        if self.exit_code == -signal.SIGXCPU:
            return "timeout"
        return "ok" if self.exit_code == 0 else "error"

    def _read(self, descriptor: int) -> bool:
        try:
            piece = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        self.kept[self.pipes[descriptor]] += piece
        return bool(piece)

    def texts(self) -> dict[str, str]:
        most = self.limits["output_bytes"]
        return {name: bytes(kept[:most]).decode("utf-8", "replace") for name, kept in self.kept.items()}


def descendants() -> list[int]:
    """All processes below this one; orphans are our own children, because we reap."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def memory_of_all() -> int:
    """Bytes in memory of everything the program started. Each process is limited by itself; this is their sum."""
    pages = 0
    with contextlib.suppress(OSError):
        for pid in descendants():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm", "rb") as file:
                pages += int(file.read().split()[1])
    return pages * resource.getpagesize()


def _tasks_of_this_user() -> int:
    """Threads that count against the same limit of processes as ours."""
    mine, tasks = str(os.getuid()), 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/status", encoding="utf-8") as file:
                    fields = dict(line.split(":", 1) for line in file if ":" in line)
                    if fields["Uid"].split()[0] == mine:
                        tasks += int(fields["Threads"])
    return max(tasks, 2)
