"""Commands as processes that begin with torch and transformers imported: a fork of a server that did it once, where a fresh
interpreter takes seconds. What they inherit is imported modules and nothing else, so a kill leaves only files behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path

import torch

from tests import forked_child

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "strop.ppo.build",
        "strop.preflight.examine",
        "strop.supervised.build",
        "strop.rollout.native.engine",
        "transformers.models.llama.modeling_llama",
        "peft",
    ]
)
if not forked_child.inside:
    forkserver.ensure_running()  # before anybody asks for one with other imports


class Forked:
    """`python -m module words` as a process, its output in files; the methods are those of subprocess.Popen."""

    def __init__(
        self, module: str, words: Sequence[str], out: Path, err: Path | None = None, **environment: str
    ) -> None:
        """`err`: where errors go when not to `out`."""
        whole = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **environment}
        self.args = [module, *words]
        self._process = _context.Process(
            target=forked_child.begin, args=(module, list(words), whole, str(out), str(err or out))
        )
        self._process.start()

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
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def kill_when(self, reached: Callable[[], bool], limit: float = 120) -> None:
        """Kill it as soon as it has got there; it is an error if it never does."""
        deadline = time.monotonic() + limit
        while not (there := reached()) and self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        self.kill()
        self.wait()
        assert there, f"exit code {self.poll()} before the moment to kill it came"


_WAITS = """
import time
from pathlib import Path
from strop.run.heartbeat import Heartbeat
mark, beat = Path({mark!r}), Heartbeat.beat
def beat_and_wait_once(self, step, phase):
    waits = step == {step} and not mark.exists()
    if waits:
        mark.touch()  # before others see the beat, and kill
    beat(self, step, phase)
    if waits:
        time.sleep(600)
Heartbeat.beat = beat_and_wait_once
"""


def waits_in_step(step: int, folder: Path) -> str:
    """The setting with which a run stays in this step, once: until it is killed, however late that is."""
    plugin = folder / "waits.py"
    plugin.write_text(_WAITS.format(step=step, mark=str(folder / "waited")))
    return f"plugins=[{plugin}]"


def run(
    module: str, words: Sequence[str], folder: Path, timeout: float = 180, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; what it said lies in `folder` as well."""
    out, err = folder / f"{module}.out", folder / f"{module}.err"
    process = Forked(module, words, out, err, **environment)
    try:
        code = process.wait(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, code, out.read_text(), err.read_text())
