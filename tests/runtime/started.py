"""Runs as commands of their own, killed on the way where a test asks for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from strop.run.heartbeat import WorkerState, read_worker_states
from tests.forked import Forked
from tests.ppo.runs import metrics, same, weights

CLOCKS = ("timing", "perf/", "reward/seconds",
          "val-aux/reward/seconds", "memory/", "system/", "rollout/", "health/")  # fmt: skip
"""Metrics that differ from run to run: clocks, what engines say of themselves, and alerts, some of which watch clocks and memory."""

TOLERANCE = 1e-5

SAVE_AT_ONCE = "actor_rollout_ref.actor.checkpoint.async_save=false"
"""So that it is known which checkpoints are there when a run is killed."""


class Started:
    """`strop ppo` with these settings, in a process."""

    def __init__(
        self, settings: Sequence[str], folder: Path, before: Sequence[str] = (), **environment: str
    ) -> None:
        """`before`: a command that runs it somewhere else."""
        self.folder = folder
        self.log = folder.with_suffix(".log")
        words = ["ppo", *settings, f"trainer.default_local_dir={folder}"]
        environment = {"OMP_NUM_THREADS": "1", **environment}
        self.process: Forked | subprocess.Popen[bytes]
        if not before:
            self.process = Forked("strop.cli", words, self.log, **environment)
            return
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "strop.cli", *words],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, where: Callable[[WorkerState], bool], limit: float = 300) -> WorkerState:
        """The first beat that is `where` it should be."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and self.process.poll() is None:
            for beat in read_worker_states(self.folder):
                if not beat.over and where(beat):
                    return beat
            time.sleep(0.01)
        raise AssertionError(f"no such moment came: {read_worker_states(self.folder)}\n{self.said()}")

    def kill(self, where: Callable[[WorkerState], bool]) -> WorkerState:
        beat = self.wait_for(where)
        os.kill(beat.pid, signal.SIGKILL)
        return beat

    def kill_child(
        self, title: str, parents: Sequence[int], besides: Sequence[int] = (), limit: float = 300
    ) -> int:
        """Kill a child of one of `parents` that Ray has named so, one that was not killed before; its number."""
        pid = self.child(title, parents, besides, limit)
        os.kill(pid, signal.SIGKILL)
        return pid

    def child(
        self, title: str, parents: Sequence[int], besides: Sequence[int] = (), limit: float = 300
    ) -> int:
        """The number of such a process, as soon as there is one."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and self.process.poll() is None:
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    words = (folder / "cmdline").read_bytes().decode(errors="replace")
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
                if (
                    words.startswith(f"ray::{title}")
                    and parent in parents
                    and int(folder.name) not in besides
                ):
                    return int(folder.name)
            time.sleep(0.05)
        raise AssertionError(f"no process ray::{title}\n{self.said()}")

    def end(self, limit: float = 240) -> int:
        try:
            return self.process.wait(limit)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def said(self) -> str:
        return self.log.read_text()


def assert_same_run(one: Path, other: Path, steps: int, besides: tuple[str, ...] = ()) -> None:
    """Bit for bit: weights, and every number that is no clock (and does not begin with `besides`)."""
    assert same(weights(one, steps), weights(other, steps))
    expected, found = metrics(one), metrics(other)
    assert expected.keys() == found.keys()
    for step, row in expected.items():
        for name in (name for name in row if not name.startswith((*CLOCKS, *besides))):
            assert found[step][name] == row[name], (step, name)


def assert_near_run(one: Path, other: Path, steps: int) -> None:
    """Up to the order in which numbers are added: weights, and every number that is no clock and not counted per rank."""
    expected, found = weights(one, steps), weights(other, steps)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert (weight - found[name]).abs().max() <= TOLERANCE * weight.abs().max(), name
    ours, theirs = metrics(other), metrics(one)
    assert ours.keys() == theirs.keys()
    for step, row in theirs.items():
        for name in (name for name in row if not name.startswith((*CLOCKS, "global_seqlen"))):
            assert ours[step][name] == pytest.approx(row[name], rel=TOLERANCE, abs=2e-5), (step, name)
