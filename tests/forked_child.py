"""The other side of tests/forked.py: all that a forked process imports before it becomes the command."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

inside = False
"""Whether this process was forked so."""


def begin(module: str, words: list[str], environment: dict[str, str], out: str, err: str) -> None:
    from strop.runtime import local

    global inside
    inside = True
    # A fork of a launcher that has computed with several threads would hang in OpenMP, whose threads it lacks: then
    # ranks are fresh interpreters, as for users.
    if environment["OMP_NUM_THREADS"] == "1":
        local.start_rank = ForkedRank  # type: ignore[assignment]
    files = [
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        for path in dict.fromkeys([out, err])
    ]
    os.dup2(files[0], 1)
    os.dup2(files[-1], 2)
    _become(module, words, environment)


def _become(module: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Be `python -m module words` with this environment."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class ForkedRank:
    """A rank that a forked launcher starts: a fork as well, where a fresh interpreter imports everything again. The
    methods are those of subprocess.Popen that the launcher uses."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        python, option, module, *words = command
        assert (python, option) == (sys.executable, "-m"), command
        ours, theirs = os.pipe()
        self.args = command
        self.stderr = os.fdopen(ours, "rb")
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_rank, args=(module, words, dict(variables), theirs, ours))
        self._process.start()
        os.close(theirs)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _rank(
    module: str, words: Sequence[str], environment: Mapping[str, str], stderr: int, launchers_end: int
) -> None:
    os.close(launchers_end)
    os.dup2(stderr, 2)
    os.close(stderr)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(module, words, environment)
