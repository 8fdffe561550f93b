"""Choose the isolation level of the sandbox, start it for a program and its tests, and read the outcomes.

The levels, best first; each is tested with a small program before it is used:

    level       network  other files and processes         needs
    namespaces  none     not visible                       root, or user namespaces for all users
    bubblewrap  none     not visible                       `bwrap`, for users that only it may isolate
    landlock    none     forbidden; names are visible      Linux 5.13 with Landlock and seccomp
    user        open     by the rights of an unused user   root
    limits      open     all rights of this user           nothing; the process limit does not hold for root

`auto` takes one of the first three and refuses to run programs where none of them works: the last two must be
asked for by name. A seccomp filter holds at every level, if the kernel has it. Time, memory, files, open
files and processes are limited at every level, and no process survives its program.
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
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import strop
from strop.host import cores_per_rank
from strop.rewards.sandbox import (
    HEADER,
    checker,  # noqa: F401 - compiled here once, so that the interpreters of programs need not
    namespaces,
    sandbox_child,  # noqa: F401
)
from strop.rewards.sandbox.cgroup import memory_group
from strop.rewards.sandbox.limits import ProgramOutcome, SandboxError, SandboxLimits, SupervisorKilled
from strop.rewards.sandbox.work_folder import empty_folder

logger = logging.getLogger(__name__)
STRONG_LEVELS = ("namespaces", "bubblewrap", "landlock")
LEVELS = (*STRONG_LEVELS, "user", "limits")
PROBE = "import json, random, socket\nprint(sum(range(5)))"


@dataclass(frozen=True)
class Isolation:
    """An isolation level, and what it protects."""

    level: str
    why_not_better: str = ""
    """Why the stronger levels do not work."""

    @property
    def cuts_network(self) -> bool:
        return self.level in STRONG_LEVELS

    @property
    def hides_files(self) -> bool:
        """Whether files and processes of the machine are not visible."""
        return self.level in ("namespaces", "bubblewrap")

    @property
    def protects_processes(self) -> bool:
        """Whether programs cannot harm the processes and files of this user."""
        return self.level != "limits"

    def __str__(self) -> str:
        network = "the network is OPEN"
        if self.cuts_network:
            network = "no network"
        files = "files of this user WRITABLE"
        if self.hides_files:
            files = "files hidden"
        elif self.level == "landlock":
            files = "files forbidden"
        elif self.protects_processes:
            files = "files readable"
        return f"{self.level} ({network}, {files}; time, memory and processes limited)"


def choose_isolation(wanted: str = "auto") -> Isolation:
    """Return the strongest level that works on this machine, or the wanted one; ValueError if it does not
    work, or if `auto` finds no level that isolates programs from the network and from files."""
    if wanted == "auto":
        return _best()
    if wanted not in LEVELS:
        raise ValueError(f"Unknown isolation {wanted!r}. Known: auto, {', '.join(LEVELS)}.")
    problem = isolation_problem(wanted)
    if problem:
        raise ValueError(
            f"The sandbox level {wanted!r} does not work on this machine: {problem}. Set isolation=auto, or "
            "repair it."
        )
    if wanted not in STRONG_LEVELS:
        _warn_of_weak_level(wanted)
    return Isolation(wanted)


@functools.cache
def _warn_of_weak_level(level: str) -> None:
    logger.warning("Programs of the model run with weak isolation, as asked for: %s.", Isolation(level))


@functools.cache
def _best() -> Isolation:
    problems: list[str] = []
    for level in STRONG_LEVELS:
        problem = isolation_problem(level)
        if not problem:
            return Isolation(level, "; ".join(problems))
        problems.append(f"{level}: {problem}")
    raise ValueError(
        f"Programs of the model cannot be isolated on this machine ({'; '.join(problems)}), so they are not "
        "run. Give the process CAP_SYS_ADMIN, or allow user namespaces (sysctl user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone or kernel.apparmor_restrict_unprivileged_userns), or install "
        "bubblewrap, or use a kernel with Landlock; or run them elsewhere with "
        "reward_model.sandbox_fusion.url. To run them without isolation, where they can reach the network "
        "and all files of this user, set isolation=limits (reward_model.sandbox_fusion.isolation, or "
        "`isolation` of the Python tool); as root, isolation=user takes the rights of an unused user."
    )


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
_PYTHON = os.path.realpath(sys.executable)
_ROOT = str(Path(strop.__file__).parent.parent)
_BOOT = (
    f"import sys; sys.path.append({_ROOT!r}); from strop.rewards.sandbox.sandbox_child import main; "
    f"sys.path.remove({_ROOT!r}); main()"
)
_COMMAND = [_PYTHON, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOT]


@functools.cache
def _slots() -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(cores_per_rank())


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
        found = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        sites = [os.path.realpath(path) for path in found]
    folders = _folders(sites)
    request = {
        "level": level,
        "program": program,
        "limits": asdict(limits),
        "packages": sites,
        "folders": folders,
        "user": next(_USERS),
        "reads_all": os.geteuid() == 0 and not _others_can_read(tuple(folders)),
    }
    with _slots(), _work_folder(level) as work, _memory_group(level, limits) as group:
        content = _pack({**request, "work": work, "group": group}, tests)
        # To remove what a program wrote in the time of one test may take as long.
        seconds = limits.total_seconds + max(GRACE, 2 * limits.seconds)
        try:
            report = _exchange(_command(level, folders, limits), content, work, seconds)
        except SupervisorKilled:
            if level != "limits":
                raise
            # At this level a program can do it, and what a program does can only lower its score.
            return [ProgramOutcome("error", stderr="The sandbox was killed.") for _ in tests]
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


@functools.cache
def _others_can_read(folders: tuple[str, ...]) -> bool:
    """Whether any user can reach these folders and read them."""
    for folder in map(Path, folders):
        if not all(parent.stat().st_mode & stat.S_IXOTH for parent in (folder, *folder.parents)):
            return False
        if not folder.stat().st_mode & stat.S_IROTH:
            return False
    return True


def _pack(request: Mapping[str, object], tests: Sequence[Mapping[str, object]]) -> bytes:
    """Return the content of the interpreter's stdin.

    The length of the JSON text, the JSON text, and the texts of assertions. The JSON text says where each
    lies; its length depends on that, so positions have a fixed number of digits.
    """
    texts: list[bytes] = []
    for test in tests:
        if "assertions" in test:
            texts.append(str(test["assertions"]).encode("utf-8", "surrogatepass"))
    start = HEADER + len(_header(request, tests, texts, 0))
    return b"%*d%s%s" % (HEADER, start - HEADER, _header(request, tests, texts, start), b"".join(texts))


def _header(
    request: Mapping[str, object], tests: Sequence[Mapping[str, object]], texts: Sequence[bytes], start: int
) -> bytes:
    lengths = iter([len(text) for text in texts])
    placed: list[Mapping[str, object]] = []
    for test in tests:
        if "assertions" in test:
            length = next(lengths)
            test = {**test, "assertions": [f"{start:012d}", length]}
            start += length
        placed.append(test)
    return json.dumps({**request, "tests": placed}).encode("utf-8", "surrogatepass")


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


def _memory_group(level: str, limits: SandboxLimits) -> contextlib.AbstractContextManager[str | None]:
    """Return the control group of a program; inside bubblewrap there is no way to join one."""
    if level == "bubblewrap":
        return contextlib.nullcontext()
    return memory_group(limits.memory_mb + limits.disk_mb)


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
        with contextlib.suppress(OSError):
            empty_folder(folder)
            os.rmdir(folder)


def _exchange(command: Sequence[str], content: bytes, work: str, seconds: float) -> dict[str, Any]:
    """Start the interpreter with `content` as its stdin and return its report."""
    # The environment of this process is not passed on: it may hold API keys. The hash seed is fixed, so that
    # scores do not depend on the order of sets.
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": work,
        "TMPDIR": work,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
    }
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    with os.fdopen(os.memfd_create("request"), "w+b") as stdin:
        stdin.write(content)
        stdin.flush()
        stdin.seek(0)
        process = _start(command, stdin, environment)
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"The sandbox did not end within {seconds:g} seconds.") from error
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        report: dict[str, Any] = json.loads(stdout)
        return report
    except json.JSONDecodeError as error:
        last = stderr.decode(errors="replace").strip()[-500:]
        kind = SupervisorKilled if process.returncode < 0 else SandboxError
        raise kind(
            f"The sandbox ended with exit code {process.returncode} and no report. It said: {last!r}"
        ) from error


def _start(
    command: Sequence[str], stdin: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command, stdin=stdin, stdout=pipe, stderr=pipe, env=environment, cwd="/", start_new_session=True
        )
    except OSError as error:
        raise SandboxError(f"The interpreter of the sandbox could not be started: {error}") from error


def _parse_outcome(result: Mapping[str, Any]) -> ProgramOutcome:
    if result["status"] == "not run":
        return ProgramOutcome("timeout")
    value: object = None
    returned = False
    # What a program wrote to the pipe may be anything.
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        value = json.loads(result["value"])["value"]
        returned = True
    return ProgramOutcome(
        result["status"],
        result["stdout"],
        result["stderr"],
        result["exit_code"],
        result["seconds"],
        value,
        returned,
    )
