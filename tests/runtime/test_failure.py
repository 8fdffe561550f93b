"""Which rank took the run down, what is told of it, and when a run is started again."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from strop.errors import CRASHED, REFUSED
from strop.run.checkpoint.layout import write_latest
from strop.run.heartbeat import (
    Heartbeat,
    WorkerState,
    last_sign_of_life,
    stacks_file,
    start_heartbeat,
    worker_log_file,
    workers_folder,
)
from strop.run.watchdog import HUNG, ORPHANED
from strop.runtime.failure import (
    MACHINE_LOST,
    WAITED,
    RankFailure,
    describe,
    first_cause,
    is_in_collective,
    slowest,
    supervise,
)
from tests.forked import waits_in_step
from tests.runtime.started import SAVE_AT_ONCE, Started, assert_same_run

WAITING = """Thread 0x1 (most recent call first):
  File "/x/strop/run/watchdog.py", line 60 in _watch

Thread 0x2 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 9 in all_gather_object
  File "/x/strop/ranks.py", line 3 in gather
"""
BUSY = WAITING.replace("/x/torch/distributed/distributed_c10d.py", "/x/user/reward.py")


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ({0: WAITED, 1: -9}, 1),
        ({0: 1, 1: WAITED}, 0),
        ({0: CRASHED, 1: -9, 2: WAITED}, 1),
        ({0: WAITED, 1: HUNG, 2: HUNG}, 1),
        ({0: -9, 1: MACHINE_LOST}, 1),
        ({0: ORPHANED, 1: CRASHED}, 1),
    ],
)
def test_the_rank_that_the_others_fell_over(codes, cause):
    assert first_cause(codes) == cause


def test_a_loss_is_told_with_place_phase_and_last_lines(tmp_path):
    workers_folder(tmp_path).mkdir()
    Heartbeat(tmp_path, 1, 2).beat(3, "update_actor")
    said = describe(RankFailure(1, 2, -9, "node7", ("almost", "there")), tmp_path)
    assert said[0] == (
        f"Rank 1 of 2 (host node7, process {os.getpid()}) was ended by SIGKILL in phase 'update_actor' of step 3; "
        "the others were stopped."
    )
    assert said[1:] == ["Its last lines:", "  almost", "  there"]
    assert describe(RankFailure(1, 2, REFUSED), tmp_path) == []  # it has told its mistake itself
    own = ("a warning", "strop: error: The vllm engine has gone.")
    assert describe(RankFailure(1, 2, 70, "node7", own, shown=True), tmp_path) == []  # printed already
    assert describe(RankFailure(1, 2, 70, "node7", own), tmp_path)[1:] == [
        "Its last lines:", "  a warning", "  strop: error: The vllm engine has gone."]  # fmt: skip
    log_file = worker_log_file(tmp_path, 1)
    log_file.write_text("almost\nthere\n")
    said = describe(RankFailure(1, 2, -9, "node7", ("almost", "there"), shown=True), tmp_path)
    assert said[1:] == [f"Its output is in {log_file}."]
    assert (
        "was lost with its machine"
        in describe(RankFailure(0, 2, MACHINE_LOST, detail="The node died."), tmp_path)[0]
    )


def test_the_slowest_rank_is_the_one_that_waits_for_nobody(tmp_path):
    def beat(rank, step=4, since=0.0):
        return WorkerState(rank, 3, "node", rank, step, "gen", since)

    assert is_in_collective(WAITING) and not is_in_collective(BUSY)
    beats = [beat(0), beat(1), beat(2)]
    assert [b.rank for b in slowest(beats, {0: WAITING, 1: BUSY, 2: WAITING})] == [1]
    assert [b.rank for b in slowest([beat(0, 5), beat(1, 4), beat(2, 5)], {})] == [1]  # a step behind
    assert [b.rank for b in slowest([beat(0, since=3), beat(1, since=2), beat(2, since=5)], {})] == [1]
    workers_folder(tmp_path).mkdir()
    for rank, stack in enumerate([WAITING, BUSY]):
        Heartbeat(tmp_path, rank, 2).beat(4, "gen")
        stacks_file(tmp_path, rank).write_text(f"--- old\n{BUSY}\n--- new\n{stack}")
    said = describe(RankFailure(0, 2, HUNG), tmp_path)[0]
    assert re.match(
        r"The run stood still: rank 1 \(host .*\) in phase 'gen' of step 4; 1 other rank\(s\) waited for it.",
        said,
    )
    assert str(stacks_file(tmp_path, 1)) in said


def test_restarts_go_on_from_what_the_run_made(tmp_path, capsys):
    seen: list[list[str]] = []
    ends = iter([RankFailure(0, 1, -9), RankFailure(0, 1, CRASHED), None])

    def attempt(more):
        seen.append(list(more))
        if len(seen) == 2:
            write_latest(tmp_path, 4)
        return next(ends)

    write_latest(tmp_path, 9)  # of another run, which trainer.resume_mode=disable leaves alone
    assert supervise(attempt, tmp_path, 2) == 0
    assert seen == [[], [], ["trainer.resume_mode=auto"]]
    assert "was ended by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loss", "allowed", "attempts", "code"),
    [
        (RankFailure(0, 1, REFUSED), 5, 1, 1),
        (RankFailure(0, 1, -2, interrupted=True), 5, 1, 130),
        (RankFailure(0, 1, -9), 0, 1, 137),
        (RankFailure(0, 1, -9), 2, 3, 137),
        (RankFailure(0, 1, MACHINE_LOST), 1, 2, CRASHED),
    ],
)
def test_what_is_not_tried_again(tmp_path, loss, allowed, attempts, code):
    tried = []
    assert supervise(lambda more: tried.append(more) or loss, tmp_path, allowed) == code
    assert len(tried) == attempts


HANG = """
import sys, time
from pathlib import Path
from strop.run.heartbeat import start_heartbeat
from strop.run.watchdog import WatchdogLimits, start_watchdog
def stuck(): time.sleep(600)
with start_heartbeat(Path(sys.argv[1])) as heart, start_watchdog(heart, WatchdogLimits(*map(float, sys.argv[2:4]))):
    heart.beat(3, "reward")
    stuck()
"""


def test_a_phase_that_hangs_ends_the_process_with_its_stacks(tmp_path):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path), "0", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == HUNG and time.monotonic() - start < 300
    assert re.search(
        r"Rank 0 \(host .*\) in phase 'reward' of step 3 for more than trainer.phase_timeout=1 s.",
        done.stderr,
    )
    assert "in stuck" in stacks_file(tmp_path, 0).read_text()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_slow_phase_is_told_once_and_goes_on(tmp_path, caplog, monkeypatch):
    from strop.run import watchdog

    monkeypatch.setattr(watchdog, "CHECK_INTERVAL", 0.05)
    monkeypatch.setattr(watchdog, "TOUCH_INTERVAL", 0.1)
    with (
        start_heartbeat(tmp_path) as heart,
        watchdog.start_watchdog(heart, watchdog.WatchdogLimits(warning=0.1, timeout=0.0)),
    ):
        heart.beat(2, "testing")
        os.utime(workers_folder(tmp_path) / "rank_0.json", (1.0, 1.0))
        until(lambda: last_sign_of_life(tmp_path) > 1.0)  # it was touched
        until(lambda: "in phase 'testing'" in caplog.text)
        time.sleep(0.3)  # a second message would come now
    told = re.findall(r"in phase 'testing' of step 2 for \d+ s: what it does is written in", caplog.text)
    assert len(told) == 1
    assert "test_a_slow_phase_is_told_once" in stacks_file(tmp_path, 0).read_text()


def test_a_full_disk_does_not_end_the_watchdog(tmp_path, caplog, monkeypatch):
    from strop.run import watchdog

    monkeypatch.setattr(watchdog, "CHECK_INTERVAL", 0.05)
    monkeypatch.setattr(watchdog, "stacks_file", lambda *_: Path("/dev/full"))
    with (
        start_heartbeat(tmp_path) as heart,
        watchdog.start_watchdog(heart, watchdog.WatchdogLimits(warning=0.1, timeout=0.0)),
    ):
        for phase in ("gen", "testing"):
            heart.beat(2, phase)
            until(lambda phase=phase: f"in phase '{phase}' of step 2" in caplog.text)


def test_stacks_are_read_without_garbage_collection(monkeypatch):
    """In CPython 3.11, a thread-local object that is collected meanwhile waits for a lock for ever."""
    from strop.run import watchdog

    enabled = []
    monkeypatch.setattr(sys, "_current_frames", lambda: enabled.append(gc.isenabled()) or {})
    watchdog._current_frames()
    assert enabled == [False] and gc.isenabled()


def test_the_main_thread_is_written_however_many_there_are(tmp_path, caplog, monkeypatch):
    from strop.run import watchdog

    monkeypatch.setattr(watchdog, "CHECK_INTERVAL", 0.05)
    over = threading.Event()
    crowd = [threading.Thread(target=over.wait, daemon=True) for _ in range(120)]
    for thread in crowd:
        thread.start()
    try:
        with (
            start_heartbeat(tmp_path) as heart,
            watchdog.start_watchdog(heart, watchdog.WatchdogLimits(warning=0.1, timeout=0.0)),
        ):
            heart.beat(2, "testing")
            until(lambda: "in phase 'testing'" in caplog.text)
    finally:
        over.set()
        for thread in crowd:
            thread.join()
    last = stacks_file(tmp_path, 0).read_text().rpartition("(most recent call first):")[2]
    assert "test_the_main_thread_is_written_however_many_there_are" in last


def test_a_worker_ends_when_its_starter_is_gone(tmp_path):
    alone = HANG.replace("WatchdogLimits(*map(float, sys.argv[2:4]))", "WatchdogLimits(0.0, 0.0), starter=1")
    done = subprocess.run(
        [sys.executable, "-c", alone, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == ORPHANED


def test_one_process_on_this_machine_restarts_by_itself(overrides, tmp_path):
    """Killed once, it ends with the weights and numbers of a run that nobody disturbed."""
    words = [*(word for word in overrides if "default_local_dir" not in word), SAVE_AT_ONCE]
    calm = Started(words, tmp_path / "calm")
    assert calm.end() == 0, calm.said()
    run = Started([*words, "trainer.max_restarts=1", waits_in_step(3, tmp_path)], tmp_path / "run")
    run.kill(lambda beat: beat.step == 3)
    assert run.end() == 0, run.said()
    assert (
        "was ended by SIGKILL in phase" in run.said()
        and "Starting again from step 2; 0 restart(s) left." in run.said()
    )
    assert_same_run(calm.folder, run.folder, 4)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_the_run_starts_again(overrides, tmp_path):
    """Rank 1 is stuck once, while it samples; rank 0 waits for it."""
    stuck = f"""
import os, time
from pathlib import Path
from strop.rollout.native.engine import NativeEngine
mark, generate = Path("{tmp_path}/mark"), NativeEngine.generate
def hang(): time.sleep(600)
def once(self, *arguments, **named):
    if os.environ.get("RANK") == "1" and not mark.exists():
        mark.touch(); hang()
    return generate(self, *arguments, **named)
NativeEngine.generate = once
"""
    (tmp_path / "stuck.py").write_text(stuck)
    words = [word for word in overrides if "default_local_dir" not in word]
    more = [
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        "trainer.phase_timeout=45",
        "trainer.max_restarts=1",
    ]
    run = Started([*words, *more, f"plugins=[{tmp_path}/stuck.py]"], tmp_path / "run")
    assert run.end(300) == 0, run.said()
    assert re.search(r"The run stood still: rank 1 \(host .*; 1 other rank\(s\) waited for it", run.said())
    assert "in hang" in stacks_file(tmp_path / "run", 1).read_text()
    assert "Starting again" in run.said()
