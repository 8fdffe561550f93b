"""Choose the isolation level of the sandbox, start it for a program and its tests, and read the outcomes.

The levels, best first; each is tested with a small program before it is used:

    level       network  other files and processes         needs
    namespaces  none     not visible                       root, or user namespaces for all users
    bubblewrap  none     not visible                       `bwrap`, for users that only it may isolate
    user        open     by the rights of an unused user   root
    limits      open     all rights of this user           nothing; the process limit does not hold for root

Time, memory, file size, open files and processes are limited at every level, and no process survives its
program.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import strop
from strop.rewards.sandbox import namespaces
from strop.rewards.sandbox.limits import ProgramOutcome, SandboxError, SandboxLimits

logger = logging.getLogger(__name__)
LEVELS = ("namespaces", "bubblewrap", "user", "limits")
PROBE = "import json, random, socket\nprint(sum(range(5)))"


@dataclass(frozen=True)
class Isolation:
    """An isolation level, and what it protects."""

    level: str
    why_not_better: str = ""
    """Why the stronger levels do not work."""

    @property
    def cuts_network(self) -> bool:
        return self.level in ("namespaces", "bubblewrap")

    @property
    def hides_files(self) -> bool:
        return self.level in ("namespaces", "bubblewrap")

    @property
    def own_user(self) -> bool:
        """Whether programs run as another user, who cannot harm the processes and files of this one."""
        return self.level != "limits"

    def __str__(self) -> str:
        network = "the network is OPEN"
        if self.cuts_network:
            network = "no network"
        files = "files of this user WRITABLE"
        if self.hides_files:
            files = "files hidden"
        elif self.own_user:
            files = "files readable"
        return f"{self.level} ({network}, {files}; time, memory and processes limited)"


def choose_isolation(wanted: str = "auto") -> Isolation:
    """Return the strongest level that works on this machine, or the wanted one; ValueError if it does not
    work."""
    if wanted == "auto":
        return _best()
    if wanted not in LEVELS:
        raise ValueError(f"Unknown isolation {wanted!r}. Known: auto, {', '.join(LEVELS)}.")
    problem = isolation_problem(wanted)
    if problem:
        raise ValueError(
            f"The sandbox level {wanted!r} does not work on this machine: {problem}. Choose auto, or repair "
            "it."
        )
    return Isolation(wanted)


@functools.cache
def _best() -> Isolation:
    problems: list[str] = []
    for level in LEVELS:
        problem = isolation_problem(level)
        if not problem:
            found = Isolation(level, "; ".join(problems))
            if not found.cuts_network:
                logger.warning(
                    "Programs of the model run with weak isolation: %s. Better was not possible: %s.",
                    found,
                    found.why_not_better,
                )
            return found
        problems.append(f"{level}: {problem}")
    raise SandboxError(f"No sandbox works on this machine: {'; '.join(problems)}.")


@functools.cache
def isolation_problem(level: str) -> str:
    """Return the error of a small program that runs at this level; empty if it works."""
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if level == "bubblewrap" and os.geteuid() == 0:
        return "root would stay root inside"
    if level == "user" and os.geteuid() != 0:
        return "only root can become another user"
    try:
        [outcome] = run_tests(
            PROBE, [{"stdin": ""}], SandboxLimits(seconds=20, total_seconds=20), level=level
        )
    except SandboxError as error:
        return str(error)
    if outcome.stdout == "10\n":
        return ""
    return f"a small program failed: {outcome.status}, {outcome.stderr.strip()[-300:]}"


# --- Run a program ------------------------------------------------------------------------------------------


GRACE = 20.0  # seconds after the time limit; an interpreter that still runs is killed, and is an error
# Dynamic users of systemd, which own nothing. Each program has its own, so that its processes are counted
# alone.
_USERS = itertools.cycle(range(61184, 65520))
_SLOTS = threading.BoundedSemaphore(os.cpu_count() or 1)
_PYTHON = os.path.realpath(sys.executable)
_ROOT = str(Path(strop.__file__).parent.parent)
_BOOT = (
    f"import sys; sys.path.append({_ROOT!r}); from strop.rewards.sandbox.sandbox_child import main; "
    f"sys.path.remove({_ROOT!r}); main()"
)
_COMMAND = [_PYTHON, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOT]


def run_program(
    program: str, stdin: str = "", limits: SandboxLimits | None = None, *, level: str | None = None
) -> ProgramOutcome:
    """Run a Python script once."""
    return run_tests(program, [{"stdin": stdin}], limits, level=level)[0]


def run_tests(
    program: str,
    tests: Sequence[Mapping[str, object]],
    limits: SandboxLimits | None = None,
    *,
    level: str | None = None,
    packages: bool = True,
) -> list[ProgramOutcome]:
    """Run a Python program once per test, each time in a new process and an empty folder; return the
    outcomes.

    A test is {"stdin": text} for a script, {"function": name, "arguments": [...]} for a function (or a method
    of a class Solution), or {"assertions": code}, which runs after the program. `packages`: installed
    packages of this environment can be imported. At most one program per CPU core runs at the same time.
    SandboxError means that the sandbox failed, not the program.
    """
    limits = limits or SandboxLimits()
    level = level or choose_isolation().level
    if not tests:
        return []
    sites: list[str] = []
    if packages:
        sites = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    folders = _folders(sites)
    request = {
        "level": level,
        "program": program,
        "tests": list(tests),
        "limits": asdict(limits),
        "packages": sites,
        "folders": folders,
        "user": next(_USERS),
    }
    with _SLOTS, _work_folder(level) as work:
        report = _exchange(
            _command(level, folders, limits), {**request, "work": work}, limits.total_seconds + GRACE
        )
    if "results" not in report:
        raise SandboxError(f"The sandbox ({level}) could not be built: {report.get('broken', report)}")
    return [_parse_outcome(result) for result in report["results"]]


def _folders(sites: Iterable[str]) -> list[str]:
    """Return the folders that a program must be able to read: the interpreter and installed packages."""
    found = {
        sys.base_prefix,
        sys.base_exec_prefix,
        sysconfig.get_path("stdlib"),
        os.path.dirname(_PYTHON),
        *sites,
    }
    return sorted(os.path.realpath(folder) for folder in found if os.path.isdir(folder))


def _command(level: str, folders: Iterable[str], limits: SandboxLimits) -> list[str]:
    if level != "bubblewrap":
        return _COMMAND
    apart = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1"]
    package = os.path.dirname(strop.__file__)
    binds: list[str] = []
    for path in [*namespaces.SYSTEM, *folders, package]:
        binds += ["--ro-bind-try", path, path]
    private = [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--remount-ro",
        "/dev",
        "--size",
        str(limits.disk_mb << 20),
        "--tmpfs",
        namespaces.WORK,
    ]
    return [shutil.which("bwrap") or "bwrap", *apart, *binds, *private, "--remount-ro", "/", "--", *_COMMAND]


@contextlib.contextmanager
def _work_folder(level: str) -> Iterator[str]:
    """Yield the working folder; at levels without a private file system, a temporary one."""
    if level in ("namespaces", "bubblewrap"):
        yield namespaces.WORK
        return
    folder = tempfile.mkdtemp(prefix="strop-sandbox-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exchange(command: Sequence[str], request: Mapping[str, object], seconds: float) -> dict[str, Any]:
    """Start the interpreter, send the request and return its report."""
    # The environment of this process is not passed on: it may hold API keys. The hash seed is fixed, so that
    # scores do not depend on the order of sets.
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": namespaces.WORK,
        "TMPDIR": namespaces.WORK,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
    }
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd="/", start_new_session=True
        )
    except OSError as error:
        raise SandboxError(f"The interpreter of the sandbox could not be started: {error}") from error
    try:
        stdout, stderr = process.communicate(
            json.dumps(request).encode("utf-8", "surrogatepass"), timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"The sandbox did not end within {seconds:g} seconds.") from error
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        content: dict[str, Any] = json.loads(stdout)
        return content
    except json.JSONDecodeError as error:
        last = stderr.decode(errors="replace").strip()[-500:]
        raise SandboxError(
            f"The sandbox ended with exit code {process.returncode} and no report. It said: {last!r}"
        ) from error


def _parse_outcome(result: Mapping[str, Any]) -> ProgramOutcome:
    if result["status"] == "not run":
        return ProgramOutcome("timeout")
    value: object = None
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        value = json.loads(result["value"])["value"]
    return ProgramOutcome(
        result["status"], result["stdout"], result["stderr"], result["exit_code"], result["seconds"], value
    )
