"""Workers say where they are, and show their stacks when asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from strop.run.heartbeat import (
    FINISHED,
    STARTING,
    Heartbeat,
    read_worker_states,
    stacks_file,
    start_heartbeat,
    workers_folder,
)


def test_a_file_per_rank_follows_the_phases(tmp_path):
    start = time.time()
    with start_heartbeat(tmp_path, rank=1, world=2) as heart:
        assert [(beat.rank, beat.phase) for beat in read_worker_states(tmp_path)] == [(1, STARTING)]
        heart.beat(3, "gen")
        written = json.loads((tmp_path / "workers/rank_1.json").read_text())
        assert written.keys() == {"rank", "world", "host", "pid", "step", "phase", "since"}
        assert (written["pid"], written["step"], written["phase"]) == (os.getpid(), 3, "gen")
        assert start - 1 < written["since"] < time.time() + 1
        with start_heartbeat(tmp_path, rank=1, world=2) as again:
            assert again is heart
        assert read_worker_states(tmp_path)[0].phase == "gen"  # the inner block has ended nothing
    assert read_worker_states(tmp_path)[0].phase == FINISHED and read_worker_states(tmp_path)[0].over
    with pytest.raises(KeyError), start_heartbeat(tmp_path, rank=1, world=2):
        raise KeyError
    assert (
        read_worker_states(tmp_path)[0].phase == "failed in starting" and read_worker_states(tmp_path)[0].over
    )


def test_ranks_of_a_larger_run_disappear(tmp_path):
    for rank in range(3):
        with start_heartbeat(tmp_path, rank=rank, world=3):
            pass
    with start_heartbeat(tmp_path, rank=0, world=2):
        assert [beat.rank for beat in read_worker_states(tmp_path)] == [0, 1]


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path, caplog):
    workers_folder(tmp_path).write_text("a file")
    with start_heartbeat(tmp_path) as heart:
        heart.beat(1, "gen")
        heart.beat(1, "adv")
    assert caplog.text.count("will not see this worker move") == 1
    assert read_worker_states(tmp_path) == []


def test_damaged_files_are_left_out(tmp_path):
    workers_folder(tmp_path).mkdir()
    (tmp_path / "workers/rank_0.json").write_text('{"rank": 0')
    (tmp_path / "workers/rank_1.json").write_text('{"rank": 1}')
    assert read_worker_states(tmp_path) == []


def test_a_signal_writes_the_stacks_of_a_busy_worker(tmp_path):
    program = (
        "import sys; from pathlib import Path; from strop.run.heartbeat import start_heartbeat\n"
        "def stuck():\n    while True: pass\n"
        "with start_heartbeat(Path(sys.argv[1])) as heart:\n    heart.beat(2, 'gen'); stuck()"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while (
            not any(beat.phase == "gen" for beat in read_worker_states(tmp_path))
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        while "stuck" not in stacks_file(tmp_path, 0).read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "in stuck" in stacks_file(tmp_path, 0).read_text()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_beat_is_cheap(tmp_path):
    workers_folder(tmp_path).mkdir()
    heart = Heartbeat(tmp_path)
    start = time.thread_time()  # not the wall clock: other processes may have the processor
    for number in range(100):
        heart.beat(number, "gen")
    assert (time.thread_time() - start) / 100 < 0.005
