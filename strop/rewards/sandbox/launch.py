"""Start a sandboxed interpreter for a program and its tests, and read what came of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import strop
from strop.rewards.sandbox import walls
from strop.rewards.sandbox.isolation import isolation
from strop.rewards.sandbox.limits import Limits, Outcome, SandboxError

GRACE = 20.0  # seconds after which an interpreter that should have ended is ended, and taken to be broken
# Users that systemd hands out for a while and that nobody else has. Each program has its own: its processes are counted alone.
_USERS = itertools.cycle(range(61184, 65520))
_SLOTS = threading.BoundedSemaphore(os.cpu_count() or 1)
_PYTHON = os.path.realpath(sys.executable)
_ROOT = str(Path(strop.__file__).parent.parent)
_BOOT = (
    f"import sys; sys.path.append({_ROOT!r}); from strop.rewards.sandbox.inside import main; sys.path.remove({_ROOT!r}); main()"
)
_COMMAND = [_PYTHON, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOT]


def run_program(program: str, stdin: str = "", limits: Limits | None = None, *, level: str | None = None) -> Outcome:
    """Run a Python script once."""
    return run_tests(program, [{"stdin": stdin}], limits, level=level)[0]


def run_tests(
    program: str,
    tests: Sequence[Mapping[str, Any]],
    limits: Limits | None = None,
    *,
    level: str | None = None,
    packages: bool = True,
) -> list[Outcome]:
    """Run a Python program once per test, each time in a new process without files, and say what it did.

    A test is {"stdin": text} for a script, {"function": name, "arguments": [...]} for a function (or a method of a class
    Solution), or {"assertions": code}, which runs after the program. `packages`: those of this environment can be imported. At
    most as many programs run at a time as the machine has cores. SandboxError: the sandbox failed, not the program.
    """
    limits, level = limits or Limits(), level or isolation().level
    if not tests:
        return []
    sites = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))] if packages else []
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
        report = _exchange(_command(level, folders, limits), {**request, "work": work}, limits.total_seconds + GRACE)
    if "results" not in report:
        raise SandboxError(f"The sandbox ({level}) could not be built: {report.get('broken', report)}")
    return [_outcome(result) for result in report["results"]]


def _folders(sites: Iterable[str]) -> list[str]:
    """What a program must be able to read: the interpreter and installed packages."""
    found = {sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"), os.path.dirname(_PYTHON), *sites}
    return sorted(os.path.realpath(folder) for folder in found if os.path.isdir(folder))


def _command(level: str, folders: Iterable[str], limits: Limits) -> list[str]:
    if level != "bubblewrap":
        return _COMMAND
    apart = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1"]
    package = os.path.dirname(strop.__file__)
    shown = [word for path in [*walls.SYSTEM, *folders, package] for word in ("--ro-bind-try", path, path)]
    own = [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--remount-ro",
        "/dev",
        "--size",
        str(limits.disk_mb << 20),
        "--tmpfs",
        walls.WORK,
    ]
    return [shutil.which("bwrap") or "bwrap", *apart, *shown, *own, "--remount-ro", "/", "--", *_COMMAND]


@contextlib.contextmanager
def _work_folder(level: str) -> Any:
    """Where there is no file system of its own, a folder that is gone afterwards."""
    if level in ("namespaces", "bubblewrap"):
        yield walls.WORK
        return
    folder = tempfile.mkdtemp(prefix="strop-sandbox-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exchange(command: Sequence[str], request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    # Nothing of our environment: it may hold keys. A fixed hash seed, so that scores do not depend on the order of sets.
    environment = {"PATH": "/usr/bin:/bin", "HOME": walls.WORK, "TMPDIR": walls.WORK, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
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
        said, complaints = process.communicate(json.dumps(request).encode("utf-8", "surrogatepass"), timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"The sandbox did not end within {seconds:g} seconds.") from error
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        return json.loads(said)
    except json.JSONDecodeError as error:
        last = complaints.decode(errors="replace").strip()[-500:]
        raise SandboxError(f"The sandbox ended with exit code {process.returncode} and no report. It said: {last!r}") from error


def _outcome(result: Mapping[str, Any]) -> Outcome:
    if result["status"] == "not run":
        return Outcome("timeout")
    value = None
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        value = json.loads(result["value"])["value"]
    return Outcome(result["status"], result["stdout"], result["stderr"], result["exit_code"], result["seconds"], value)
