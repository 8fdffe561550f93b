"""A folder has one run at a time, until its process ends in whatever way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strop.run.heartbeat import Heartbeat, run_lock, workers_folder

HOLD = """
import os, sys, time
from pathlib import Path
from strop.run.heartbeat import run_lock
with run_lock(Path(sys.argv[1])):
    if os.fork() == 0:  # a child that outlives it holds nothing
        os.close(1)
        time.sleep(20)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    Heartbeat(tmp_path).beat(3, "gen")
    with (
        pytest.raises(
            ValueError, match=r"has not ended \(rank 0 .*'gen' of step 3\)\. Set trainer\.experiment_name"
        ),
        run_lock(tmp_path),
    ):
        pass
    first.kill()
    first.wait()
    with run_lock(tmp_path):
        pass


def test_a_folder_without_locks_is_no_obstacle(tmp_path: Path) -> None:
    workers_folder(tmp_path).write_text("a file")
    ran = 0
    for _ in range(2):  # it is held by nobody afterwards either
        with run_lock(tmp_path):
            ran += 1
    assert ran == 2 and workers_folder(tmp_path).read_text() == "a file"
