"""Runs that are killed, also in the middle of a save, go on as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strop.run.checkpoint import layout
from strop.run.checkpoint.resume import resume
from strop.run.checkpoint.store import load
from tests.run.test_tree import same

ROOT = Path(__file__).parents[2]
ENDLESS = 1_000_000


class Killer:
    """Starts runs in a helper process and kills them."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(Path(__file__).with_name("kill_worker.py"))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )

    def run(
        self,
        directory: Path,
        steps: int,
        *,
        kill_after: float | None = None,
        kill_when: Callable[[], bool] | None = None,
        die_at: int | None = None,
    ) -> list[str]:
        """What the run said before it ended."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(
            json.dumps({"directory": str(directory), "steps": steps, "die_at": die_at}) + "\n"
        )
        self.process.stdin.flush()
        lines = [self.process.stdout.readline().strip()]
        while not lines[-1].isdigit():
            lines.append(self.process.stdout.readline().strip())
        if kill_after is not None:
            time.sleep(kill_after)
        if kill_when is not None:
            deadline = time.monotonic() + 60.0
            while not kill_when() and time.monotonic() < deadline:
                time.sleep(0.0)
        if kill_after is not None or kill_when is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(lines[-1]), signal.SIGKILL)
        while lines[-1] != "ended":
            lines.append(self.process.stdout.readline().strip())
        return lines


@pytest.fixture
def disk() -> Iterator[Path]:
    """Memory where there is some: a kill loses nothing that a power failure would, so a real disk only makes this slow."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    killer = Killer()
    yield killer
    assert killer.process.stdin
    killer.process.stdin.close()
    killer.process.wait(timeout=60)


def last_safe(said: list[str]) -> int:
    return max((int(line.split()[1]) for line in said if line.startswith("saved")), default=0)


def is_saving(directory: Path) -> bool:
    return directory.exists() and any(path.name.startswith(".saving") for path in directory.iterdir())


def test_killed_at_random_moments_equals_never_killed(killer: Killer, disk: Path) -> None:
    chance = random.Random(5)
    torn = disk / "torn"
    reached = left_overs = kills = 0
    while kills < 10 or (not left_overs and kills < 80):
        kills += 1
        if kills % 2:
            said = killer.run(torn, ENDLESS, kill_after=chance.uniform(0.0, 0.1))
        else:  # on a busy machine a random moment hardly hits a save
            said = killer.run(torn, ENDLESS, kill_when=lambda: is_saving(torn))
        left_overs += is_saving(torn)
        found = resume(torn, mode="auto")
        now = found.step if found else 0
        assert now >= max(reached, last_safe(said)), "a checkpoint that was safe is gone"
        reached = now
    assert left_overs, "no kill hit a save"
    last = reached + 2
    assert "done" in killer.run(torn, last)
    killer.run(disk / "whole", last)
    assert same(load(torn / f"global_step_{last}"), load(disk / "whole" / f"global_step_{last}"))
    assert [path.name for path in torn.iterdir() if path.name.startswith(".")] == []


def test_killed_at_every_point_of_a_save(killer: Killer, disk: Path) -> None:
    killer.run(disk / "whole", 3)
    expected = load(disk / "whole/global_step_3")
    points = left_overs = 0
    finished = False
    while not finished:
        points += 1
        torn = disk / f"torn{points}"
        killer.run(torn, 1)
        finished = "done" in killer.run(torn, 2, die_at=points)
        left_overs += any(path.name.startswith(".") for path in torn.iterdir())
        found = resume(torn, mode="auto")
        assert found is not None and found.step >= 1
        assert "done" in killer.run(torn, 3)
        assert same(load(torn / "global_step_3"), expected)
        assert [c.step for c in layout.saved_checkpoints(torn)] == [2, 3]
        assert [path.name for path in torn.iterdir() if path.name.startswith(".")] == []
        shutil.rmtree(torn)
    assert points > 10 and left_overs > 5


@pytest.mark.slow
def test_killed_while_a_step_is_saved_again(killer: Killer, disk: Path) -> None:
    """The run is rewound by hand, so the saves replace older checkpoints of the same steps."""
    points = 0
    finished = False
    while not finished:
        points += 1
        torn = disk / f"torn{points}"
        killer.run(torn, 2)
        expected = load(torn / "global_step_2")
        layout.write_latest(torn, 1)
        finished = "done" in killer.run(torn, 2, die_at=points)
        found = resume(torn, mode="auto")
        assert found is not None and {c.step for c in layout.saved_checkpoints(torn)} == {1, 2}
        assert "done" in killer.run(torn, 2)
        assert same(load(torn / "global_step_2"), expected)
        shutil.rmtree(torn)
    assert points > 10
