"""Runs as commands of their own, killed on the way where a test asks for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from strop.run.heartbeat import Beat, read_beats
from tests.trainer.runs import metrics, same, weights

CLOCKS = ("timing", "perf/", "rollout/seconds", "rollout/tokens_per_second", "rollout/prefill_share", "reward/seconds",
          "val-aux/reward/seconds", "memory/", "system/")  # fmt: skip
"""Metrics that differ from run to run."""


class Started:
    """`strop ppo` with these settings, in a process."""

    def __init__(self, settings: Sequence[str], folder: Path, **environment: str) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "strop.cli", "ppo", *settings, f"trainer.default_local_dir={folder}"],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, where: Callable[[Beat], bool], limit: float = 120) -> Beat:
        """The first beat that is `where` it should be."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and self.process.poll() is None:
            for beat in read_beats(self.folder):
                if not beat.over and where(beat):
                    return beat
            time.sleep(0.01)
        raise AssertionError(f"no such moment came: {read_beats(self.folder)}\n{self.said()}")

    def kill(self, where: Callable[[Beat], bool]) -> Beat:
        beat = self.wait_for(where)
        os.kill(beat.pid, signal.SIGKILL)
        return beat

    def end(self, limit: float = 240) -> int:
        try:
            return self.process.wait(limit)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def said(self) -> str:
        return self.log.read_text()


def assert_same_run(one: Path, other: Path, steps: int) -> None:
    """Bit for bit: weights, and every number that is no clock."""
    assert same(weights(one, steps), weights(other, steps))
    expected, found = metrics(one), metrics(other)
    assert expected.keys() == found.keys()
    for step, row in expected.items():
        for name in (name for name in row if not name.startswith(CLOCKS)):
            assert found[step][name] == row[name], (step, name)
