"""The trusted code inside the sandbox: it runs a program once per test, each time in a new process.

It reads a request from stdin, which is a file: JSON, then the texts of assertions. The texts are read by the
process that checks them and by no other; the expected outputs of other tests are not here at all. So a
program, which runs in a copy of this process, finds neither. The report is JSON on stdout. `launch.py` starts
this in a bare interpreter, which must not import the rest of the package.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from strop.rewards.sandbox import HEADER, landlock, namespaces, seccomp
from strop.rewards.sandbox.cgroup import Membership
from strop.rewards.sandbox.program import Program
from strop.rewards.sandbox.watch import ProcessWatch, descendants, tasks_of_this_user
from strop.rewards.sandbox.work_folder import empty_folder

STDOUT = "stdout"
STDERR = "stderr"
VALUE = "value"
CALLS = "calls"
REPLIES = "replies"
LEFTOVERS = {
    "status": "error",
    "seconds": 0.0,
    "exit_code": None,
    "stdout": "",
    "stderr": "Files of an earlier test could not be removed.",
    "value": "",
}
"""The result of tests after one whose files cannot be removed; every test needs an empty folder."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
Request = Mapping[str, Any]
"""Parsed JSON of `launch.py`."""


def main() -> NoReturn:
    """Answer the request on stdin and exit."""
    namespaces.die_with_parent()
    report = os.dup(1)
    request_file = os.dup(0)
    request = json.loads(os.pread(request_file, int(os.pread(request_file, HEADER, 0)), HEADER))
    if any("assertions" in test for test in request["tests"]):
        # Loaded now: the package cannot be read from inside.
        import strop.rewards.sandbox.checker  # noqa: F401
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        supervisor = Supervisor(request, request_file, Isolated(request))
    except OSError as error:
        _report_and_exit(report, {"broken": f"{type(error).__name__}: {error}"})
    results: list[dict[str, object]] = []
    for test in request["tests"]:
        remaining = supervisor.deadline - time.monotonic()
        if remaining <= 0:
            results.append({"status": "not run"})
        elif supervisor.is_clean:
            results.append(supervisor.run(test, remaining))
        else:
            results.append(LEFTOVERS)
    _report_and_exit(report, {"results": results})


def _report_and_exit(report: int, content: Mapping[str, object]) -> NoReturn:
    with os.fdopen(report, "w", encoding="utf-8") as pipe:
        json.dump(content, pipe)
    os._exit(0)


class Isolated:
    """The isolation level of a request, applied to this process; programs get the rest of it in their own."""

    def __init__(self, request: Request):
        level = request["level"]
        self.group: Membership | None = None
        if request["group"]:
            self.group = Membership(request["group"])
        self.ruleset: landlock.Ruleset | None = None
        own_user = level in ("user", "landlock") and os.geteuid() == 0
        missing = seccomp.problem()
        if level == "namespaces":
            own_user = os.geteuid() == 0
            self._enter_namespaces(request)
        else:
            namespaces.become_reaper()
            os.chdir(request["work"])
        if level == "landlock":
            if missing:
                raise OSError(missing)
            readable = [*namespaces.SYSTEM, *request["folders"]]
            self.ruleset = landlock.Ruleset(readable, namespaces.DEVICES, request["work"])
            self.scopes_signals = landlock.scopes_signals(landlock.version())
        self.user: int | None = None
        if own_user:
            self.user = request["user"]
        if own_user and level != "namespaces":
            os.chown(".", request["user"], request["user"])
        self.reads_all = level == "landlock" and request["reads_all"]
        self.level = level
        self.has_filter = not missing
        namespaces.set_dumpable(False)

    def _enter_namespaces(self, request: Request) -> None:
        namespaces.unshare()
        first = os.fork()
        if first:  # the new namespaces hold for children only
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        namespaces.die_with_parent()
        namespaces.build_root(request["folders"], request["limits"]["disk_mb"])

    def confine(self, trusted: bool) -> None:
        """In a child process: give up all rights that the level does not leave to programs.

        A trusted process gives up the same, and other processes cannot read its memory.
        """
        if self.group is not None:
            self.group.join()
        nested = not self.has_filter and not trusted
        namespaces.drop_privileges(self.user, reads_all=self.reads_all, nested=nested, dumpable=not trusted)
        namespaces.die_with_parent()
        if self.ruleset is not None:
            self.ruleset.restrict()
        if self.ruleset is not None:
            seccomp.install(seccomp.build_filter(outside=True, scoped_signals=self.scopes_signals))
        elif self.has_filter:
            open_network = self.level in ("user", "limits")
            seccomp.install(seccomp.build_filter(outside=False, network=open_network))


class Supervisor:
    """Runs the program of a request in child processes, and kills what they leave behind."""

    def __init__(self, request: Request, request_file: int, isolated: Isolated):
        self.request = request
        self.request_file = request_file
        self.limits = request["limits"]
        self.isolated = isolated
        self.work = os.getcwd()
        self.measured_folder: str | None = None
        if isolated.level not in ("namespaces", "bubblewrap"):
            self.measured_folder = self.work
        self.is_clean = True
        self.deadline = time.monotonic() + self.limits["total_seconds"]
        self.is_init = os.getpid() == 1
        """Whether this is the first process of a PID namespace: all processes in it belong to the program."""

    def run(self, test: Request, seconds: float) -> dict[str, object]:
        """Run the program for one test and return its result."""
        pipes = {name: os.pipe() for name in (STDOUT, STDERR, VALUE, CALLS, REPLIES)}
        start = time.monotonic()
        child = self._start_program(test, pipes)
        if "assertions" in test:
            child = self._start_checker(test["assertions"], pipes)
        readers: dict[int, str] = {}
        for name, (read_end, write_end) in pipes.items():
            os.close(write_end)
            if name in (STDOUT, STDERR, VALUE):
                readers[read_end] = name
            else:
                os.close(read_end)
        watch = ProcessWatch(
            child, readers, self.limits, group=self.isolated.group, folder=self.measured_folder
        )
        status = watch.until(start + min(seconds, self.limits["seconds"]))
        self._kill_all()
        duration = time.monotonic() - start
        self.is_clean = empty_folder(self.work)
        return {"status": status, "seconds": duration, "exit_code": watch.exit_code, **watch.texts()}

    def _start_program(self, test: Request, pipes: Mapping[str, tuple[int, int]]) -> int:
        """Start the process of the program; it can write a value unless another process checks it."""
        child = os.fork()
        if child:
            return child
        ends = {VALUE: pipes[VALUE][1]}
        if "assertions" in test:
            ends = {CALLS: pipes[CALLS][0], REPLIES: pipes[REPLIES][1]}
        self._become_child(pipes, test.get("stdin", ""), ends.values())
        Program(self.request["program"], test, ends, self.request["packages"]).run()

    def _start_checker(self, text: Sequence[int | str], pipes: Mapping[str, tuple[int, int]]) -> int:
        """Start the process of the assertions, which are `text` = (position, length) in the request."""
        from strop.rewards.sandbox import checker

        child = os.fork()
        if child:
            return child
        position, length = map(int, text)
        source = os.pread(self.request_file, length, position).decode("utf-8", "surrogatepass")
        ends = {VALUE: pipes[VALUE][1], CALLS: pipes[CALLS][1], REPLIES: pipes[REPLIES][0]}
        self._become_child(pipes, "", ends.values(), trusted=True)
        checker.check(source, ends, self.request["packages"], self.limits["output_bytes"])

    def _become_child(
        self,
        pipes: Mapping[str, tuple[int, int]],
        stdin: str,
        keep: Iterable[int],
        *,
        trusted: bool = False,
    ) -> None:
        """In a child process: set standard streams, limits and privileges; close all other descriptors."""
        os.setsid()
        last_descriptor = os.sysconf("SC_OPEN_MAX")
        stdin_file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
        with os.fdopen(os.dup(stdin_file), "wb") as file:
            file.write(stdin.encode("utf-8", "replace"))
        os.lseek(stdin_file, 0, os.SEEK_SET)
        fcntl.fcntl(stdin_file, fcntl.F_ADD_SEALS, _SEALS)  # else memory that is not counted
        os.dup2(stdin_file, 0)
        os.dup2(pipes[STDOUT][1], 1)
        os.dup2(pipes[STDERR][1], 2)
        sys.stdin = io.TextIOWrapper(
            io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="replace"
        )
        sys.__stdin__ = sys.stdin  # type: ignore[misc]
        self._set_limits()
        self.isolated.confine(trusted)
        first = 3
        for descriptor in sorted(keep):
            os.closerange(first, descriptor)
            first = descriptor + 1
        os.closerange(first, last_descriptor)

    def _set_limits(self) -> None:
        limits = self.limits
        processes = limits["processes"]
        if self.isolated.user is None:
            processes += tasks_of_this_user()
        for kind, limit in (
            (resource.RLIMIT_AS, limits["memory_mb"] << 20),
            (resource.RLIMIT_FSIZE, limits["disk_mb"] << 20),
            (resource.RLIMIT_NOFILE, limits["open_files"]),
            (resource.RLIMIT_NPROC, processes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, int(limits["seconds"]) + 2),
        ):
            _, hard_limit = resource.getrlimit(kind)
            if hard_limit != resource.RLIM_INFINITY:
                limit = min(limit, hard_limit)
            resource.setrlimit(kind, (limit, limit))

    def _kill_all(self) -> None:
        """Kill all processes that the program started."""
        while True:
            if self.is_init:
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
