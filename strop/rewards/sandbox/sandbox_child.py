"""The trusted code inside the sandbox: it runs a program once per test, each time in a new process.

It reads a request as JSON from stdin and writes a report as JSON to stdout. It has the inputs of the tests
and never the expected outputs, so a program cannot read them here. `launch.py` starts it in a bare
interpreter, which must not import the rest of the package.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import json
import linecache
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from strop.rewards.sandbox import namespaces

CHECK_INTERVAL = 0.05  # seconds between checks of the memory of all processes
STDOUT = "stdout"
STDERR = "stderr"
VALUE = "value"
FILE = "program.py"
Request = Mapping[str, Any]
"""Parsed JSON of `launch.py`."""


def main() -> NoReturn:
    """Answer the request on stdin and exit."""
    namespaces.die_with_parent()
    report = os.dup(1)
    request = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        supervisor = Supervisor(request, own_user=_isolate(request))
    except OSError as error:
        _report_and_exit(report, {"broken": f"{type(error).__name__}: {error}"})
    results: list[dict[str, object]] = []
    for test in request["tests"]:
        remaining = supervisor.deadline - time.monotonic()
        if remaining > 0:
            results.append(supervisor.run(test, remaining))
        else:
            results.append({"status": "not run"})
    _report_and_exit(report, {"results": results})


def _report_and_exit(report: int, content: Mapping[str, object]) -> NoReturn:
    with os.fdopen(report, "w", encoding="utf-8") as pipe:
        json.dump(content, pipe)
    os._exit(0)


def _isolate(request: Request) -> bool:
    """Apply the isolation level of the request; True if programs run as another user."""
    own_user = request["level"] == "user"
    if request["level"] == "namespaces":
        own_user = os.geteuid() == 0
        namespaces.unshare()
        first = os.fork()
        if first:  # the new namespaces hold for children only
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        namespaces.die_with_parent()
        namespaces.build_root(request["folders"], request["limits"]["disk_mb"])
    else:
        namespaces.become_reaper()
        os.chdir(request["work"])
        if own_user:
            os.chown(".", request["user"], request["user"])
    namespaces.set_dumpable(False)
    return own_user


class Supervisor:
    """Runs the program of a request in child processes, and kills what they leave behind."""

    def __init__(self, request: Request, own_user: bool):
        self.request = request
        self.limits = request["limits"]
        self.user: int | None = None
        if own_user:
            self.user = request["user"]
        self.work = os.getcwd()
        self.deadline = time.monotonic() + self.limits["total_seconds"]
        self.is_init = os.getpid() == 1
        """Whether this is the first process of a PID namespace: all processes in it belong to the program."""

    def run(self, test: Request, seconds: float) -> dict[str, object]:
        """Run the program for one test and return its result."""
        pipes = {name: os.pipe() for name in (STDOUT, STDERR, VALUE)}
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            self._become_program(pipes, test.get("stdin", ""))
            Program(self.request["program"], test, pipes[VALUE][1], self.request["packages"]).run()
        readers: dict[int, str] = {}
        for name, (read_end, write_end) in pipes.items():
            os.close(write_end)
            readers[read_end] = name
        watch = ProcessWatch(child, readers, self.limits)
        status = watch.until(start + min(seconds, self.limits["seconds"]))
        self._kill_all()
        duration = time.monotonic() - start
        self._empty_work_folder()
        return {"status": status, "seconds": duration, "exit_code": watch.exit_code, **watch.texts()}

    def _become_program(self, pipes: Mapping[str, tuple[int, int]], stdin: str) -> None:
        """In the child process: set standard streams, limits and privileges; close all other descriptors."""
        os.setsid()
        stdin_file = os.memfd_create("stdin")
        with os.fdopen(os.dup(stdin_file), "wb") as file:
            file.write(stdin.encode("utf-8", "replace"))
        os.lseek(stdin_file, 0, os.SEEK_SET)
        os.dup2(stdin_file, 0)
        os.dup2(pipes[STDOUT][1], 1)
        os.dup2(pipes[STDERR][1], 2)
        value_pipe = pipes[VALUE][1]
        os.closerange(3, value_pipe)
        os.closerange(value_pipe + 1, os.sysconf("SC_OPEN_MAX"))
        sys.stdin = io.TextIOWrapper(
            io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="replace"
        )
        sys.__stdin__ = sys.stdin  # type: ignore[misc]
        self._set_limits()
        namespaces.drop_privileges(self.user)
        namespaces.die_with_parent()

    def _set_limits(self) -> None:
        limits = self.limits
        processes = limits["processes"]
        if self.user is None:
            processes += _tasks_of_this_user()
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

    def _empty_work_folder(self) -> None:
        """Remove all files, so that every test begins with an empty folder."""
        for name in os.listdir(self.work):
            path = os.path.join(self.work, name)
            if os.path.isdir(path) and not os.path.islink(path):
                import shutil  # slow to load, and rarely needed

                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(path)


class ProcessWatch:
    """Reads the output of a process until it ends, or exceeds its time, output or memory limit."""

    def __init__(self, child: int, pipes: Mapping[int, str], limits: Request):
        self.child = child
        self.pipes = dict(pipes)
        self.limits = limits
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
                if total_memory() > self.limits["memory_mb"] << 20:
                    return "memory"
                next_check = now + CHECK_INTERVAL
            ready = dict(poll.poll(min(remaining, CHECK_INTERVAL) * 1000 + 1))
            for descriptor in ready:
                if descriptor != ended and not self._read(descriptor):
                    poll.unregister(descriptor)
            if self._has_too_much_output():
                return "output"
            if ended in ready:
                return self._finish()

    def _finish(self) -> str:
        _, status = os.waitpid(self.child, 0)
        self.exit_code = os.waitstatus_to_exitcode(status)
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
    for name in os.listdir("/proc"):
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


def total_memory() -> int:
    """Return the resident memory of all processes of the program in bytes; rlimits hold for one process
    only."""
    pages = 0
    with contextlib.suppress(OSError):
        for pid in descendants():
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(f"/proc/{pid}/statm", "rb") as file,
            ):
                pages += int(file.read().split()[1])
    return pages * resource.getpagesize()


def _tasks_of_this_user() -> int:
    """Return the number of threads that count against the process limit of this user."""
    user = str(os.getuid())
    tasks = 0
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/status", encoding="utf-8") as file:
                    fields = dict(line.split(":", 1) for line in file if ":" in line)
                    if fields["Uid"].split()[0] == user:
                        tasks += int(fields["Threads"])
    return max(tasks, 2)


# --- In the process of one test -----------------------------------------------------------------------------


class Program:
    """The program in the process of one test: it runs as a script, then a function or assertions may run."""

    def __init__(self, source: str, test: Request, value_pipe: int, packages: Sequence[str]):
        """`value_pipe`: the value of a function, or true after the assertions, is written to it."""
        self.source = source
        self.test = test
        self.value_pipe = value_pipe
        self.packages = packages

    def run(self) -> NoReturn:
        """Run it and exit like an interpreter, but without destroying all objects, which takes longer."""
        code = 0
        try:
            self._run()
        except SystemExit as end:
            code = _exit_code(end)
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            _print_traceback(error)
            code = 1
        finally:
            _wait_for_threads()
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)

    def _run(self) -> None:
        sys.path[:] = [*sys.path, *self.packages, os.getcwd()]
        sys.argv = [FILE]
        # Scripts use exit() and quit(), which `site` defines; it is not loaded.
        builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
        script = self.test.get("function") is None and self.test.get("assertions") is None
        module = ModuleType("__main__" if script else "program")
        sys.modules[module.__name__] = module
        self._execute(self.source, FILE, module)
        if self.test.get("function") is not None:
            self._send_value(self._call(module, self.test["function"], self.test["arguments"]))
        elif self.test.get("assertions") is not None:
            self._execute(self.test["assertions"], "assertions.py", module)
            self._send_value(True)

    def _execute(self, source: str, name: str, module: ModuleType) -> None:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)

    def _call(self, module: ModuleType, name: str, arguments: Sequence[object]) -> object:
        """Call the function of the program, or the method of its class Solution."""
        owner: object = module
        if hasattr(module, "Solution") and not hasattr(module, name):
            owner = module.Solution()
        return getattr(owner, name)(*arguments)

    def _send_value(self, value: object) -> None:
        with os.fdopen(self.value_pipe, "w", encoding="utf-8") as pipe:
            json.dump({"value": value}, pipe, default=_to_json)


def _print_traceback(error: BaseException) -> None:
    """Print the traceback without the frames of this file."""
    import traceback

    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _wait_for_threads() -> None:
    """Wait for threads that are not daemons, as at the end of any script."""
    threading = sys.modules.get("threading")
    if threading is not None:
        with contextlib.suppress(Exception):
            threading._shutdown()


def _to_json(value: Any) -> object:
    """Return arrays, sets, queues and generators as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value)
