"""The hang doctor: real processes that hang, die, or are done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.run import doctor
from strop.run.doctor import conclusion, diagnose, main, main_thread, render
from strop.run.heartbeat import WorkerState, read_worker_states, stacks_file, workers_folder

WORKER = """
import os, sys, threading, time
from pathlib import Path
from strop.run.heartbeat import start_heartbeat

def wait_for_an_answer():
    os.write(1, b"waits\\n")  # at once: there are two threads
    time.sleep(600)

with start_heartbeat(Path(sys.argv[1]), int(sys.argv[2]), 2) as heart:
    heart.beat(int(sys.argv[3]), sys.argv[4])
    threading.Thread(target=wait_for_an_answer, daemon=True).start()
    wait_for_an_answer()
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """Rank 0 waits in update_actor of step 8, rank 1 still scores step 7."""
    places = [("0", "8", "update_actor"), ("1", "7", "reward")]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), *place], stdout=subprocess.PIPE, text=True
        )
        for place in places
    ]
    for process in started:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["waits\n"] * 2  # both threads of it
    patient = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: until_written(tmp_path)})
    monkeypatch.setattr("strop.run.doctor.time", patient)
    yield started
    for process in started:
        process.kill()
        process.wait()


def until_written(folder: Path) -> None:
    """On a busy machine, a process may stand still while it writes its stacks, or before."""
    time.sleep(0.05)
    deadline = time.monotonic() + 60
    for rank in (0, 1):
        path = stacks_file(folder, rank)
        while path.exists() and (text := path.read_text()) and not text.endswith(" in <module>\n"):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def age(folder: Path, rank: int, seconds: float) -> None:
    """Let a worker have been in its phase for long; its process is as old as that only on paper."""
    path = workers_folder(folder) / f"rank_{rank}.json"
    beat = json.loads(path.read_text())
    path.write_text(json.dumps({**beat, "since": beat["since"] - seconds}))


def test_stacks_phases_and_who_is_behind(tmp_path: Path, workers, monkeypatch, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 6, "data": {"rollout/occupancy": 0.5, "actor/lr": 1e-6}}\n'
    )
    monkeypatch.setattr(doctor.diagnose, "__defaults__", (60.0,))
    assert main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "rank 1 of 2" in told and "running, step 7, phase 'reward'" in told
    assert told.count("wait_for_an_answer") == 2  # the main thread of each
    assert "last logged step: 6" in told and "waiting: rollout/occupancy 0.5" in told and "It moves" in told
    assert all(process.poll() is None for process in workers)
    monkeypatch.setattr("strop.run.doctor.is_alive", lambda worker: True)
    for rank in (0, 1):
        age(tmp_path, rank, 1000.0)
    assert main([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert (
        "Rank 1 has been in 'reward' of step 7 for 17 min" in told
        and "The others wait in update_actor." in told
    )


def test_a_stopped_process_still_has_a_phase(tmp_path: Path, workers, monkeypatch) -> None:
    """Its stacks cannot be had, its place can."""
    os.kill(workers[1].pid, signal.SIGSTOP)
    os.waitpid(workers[1].pid, os.WUNTRACED)  # all its threads stand still
    request = doctor._request_stacks

    def patient_with_the_other(path: Path, pid: int, timeout: float) -> str:
        return request(path, pid, timeout if pid == workers[1].pid else 60.0)

    monkeypatch.setattr(doctor, "_request_stacks", patient_with_the_other)
    found = diagnose(tmp_path, timeout=0.5)
    assert [report.status for report in found.workers] == ["running", "silent"]
    os.kill(workers[1].pid, signal.SIGCONT)


def test_one_that_was_killed_is_named(tmp_path: Path, workers) -> None:
    workers[0].kill()
    workers[0].wait()
    found = diagnose(tmp_path, timeout=60.0)
    assert [report.status for report in found.workers] == ["gone", "running"]
    told = "The process of rank 0 ended without a message (killed, or out of memory). The same command resumes the run."
    assert conclusion(found) == told


def test_a_stranger_with_the_same_number_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        beat = {
            "rank": 0,
            "world": 1,
            "host": os.uname().nodename,
            "pid": stranger.pid,
            "step": 3,
            "phase": "gen",
        }
        workers_folder(tmp_path).mkdir()
        file = workers_folder(tmp_path) / "rank_0.json"
        file.write_text(json.dumps({**beat, "since": time.time() - 3600}))  # the worker was there long before
        assert diagnose(tmp_path).workers[0].status == "gone"
        file.write_text(
            json.dumps({**beat, "since": time.time() + 1})
        )  # no way to tell, but it would not survive the signal
        assert diagnose(tmp_path).workers[0].status == "silent"
        time.sleep(0.2)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_runs_elsewhere_over_and_never_started(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no heartbeat"):
        diagnose(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        diagnose(tmp_path / "nothing")
    workers_folder(tmp_path).mkdir()
    base = {"world": 2, "pid": 1, "step": 4, "since": time.time() - 500}
    (workers_folder(tmp_path) / "rank_0.json").write_text(
        json.dumps({**base, "rank": 0, "host": "far", "phase": "gen"})
    )
    assert "Run this command on far for its stacks." in render(diagnose(tmp_path))
    (workers_folder(tmp_path) / "rank_0.json").write_text(
        json.dumps({**base, "rank": 0, "host": "far", "phase": "finished"})
    )
    (workers_folder(tmp_path) / "rank_1.json").write_text("torn")
    assert [beat.rank for beat in read_worker_states(tmp_path)] == [0]
    assert main([str(tmp_path)]) == 0 and "The run is over: finished." in render(diagnose(tmp_path))
    (tmp_path / "alerts.jsonl").write_bytes(b"{}\n\xff\n")
    assert "alerts: 2" in render(diagnose(tmp_path))
    (workers_folder(tmp_path) / "rank_1.json").write_text(
        json.dumps({**base, "rank": 1, "host": "far", "phase": "failed in gen"})
    )
    told = "The run failed: rank 1 (host far, process 1) in phase 'gen' of step 4."
    assert main([str(tmp_path)]) == 1 and render(diagnose(tmp_path)).endswith(told + "\n")
    (workers_folder(tmp_path) / "rank_1.stacks").write_text("Thread 0x01")
    assert conclusion(diagnose(tmp_path)).endswith(
        "Its last stacks are in " + str(workers_folder(tmp_path) / "rank_1.stacks") + "."
    )


@pytest.mark.parametrize(
    ("phase", "seconds", "still"),
    [("reward", 30, True), ("gen", 600, False), ("gen", 4000, True), ("save", 90, False)],
)
def test_what_is_long_goes_by_what_is_usual(tmp_path: Path, phase: str, seconds: float, still: bool) -> None:
    lines = [
        {"step": step, "data": {"timing_s/reward": 0.02, "timing_s/gen": 300.0 + step}} for step in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    beat = {
        "rank": 0,
        "world": 1,
        "host": "far",
        "pid": 1,
        "step": 4,
        "phase": phase,
        "since": time.time() - seconds,
    }
    workers_folder(tmp_path).mkdir()
    (workers_folder(tmp_path) / "rank_0.json").write_text(json.dumps(beat))
    told = conclusion(diagnose(tmp_path))
    assert told.startswith(f"Rank 0 has been in '{phase}'" if still else "It moves"), told
    assert ("usually takes 0.02 s" in told) == (phase == "reward")


def test_the_main_thread_is_found() -> None:
    text = (
        'Current thread 0x01 (most recent call first):\n  File "/a/b/lib/python3.11/threading.py", line 5 in wait\n\n'
        'Thread 0x02 (most recent call first):\n  File "/x/site-packages/torch/nn.py", line 3 in forward\n'
        '  File "/home/me/strop/ppo/trainer.py", line 9 in fit\n'
    )
    assert main_thread(text) == ["torch/nn.py:3 forward", "strop/ppo/trainer.py:9 fit"]
    assert WorkerState(0, 1, "h", 1, 2, "gen", 0.0).over is False
