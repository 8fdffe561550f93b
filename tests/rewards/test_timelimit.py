"""The time limit holds whatever the function does, from any thread, and never turns into a score."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from strop.registry import load_attribute
from strop.rewards import timelimit
from strop.rewards.timelimit import TimeLimitedPool, WorkerDiedError
from tests.rewards import hostile


@pytest.fixture(scope="module")
def pool() -> Iterator[TimeLimitedPool]:
    with TimeLimitedPool(workers=2) as made:
        yield made


def test_results_and_exceptions_come_back(pool: TimeLimitedPool) -> None:
    assert pool.call(hostile.add, 2, right=3, timeout=100) == 5
    assert pool.call(hostile.chatter, timeout=100) == "done"
    with pytest.raises(ZeroDivisionError, match="by nought"):
        pool.call(hostile.complain, "by nought", timeout=100)
    with pytest.raises(RuntimeError, match="Picky: ab"):
        pool.call(hostile.complain_pickily, timeout=100)
    with pytest.raises(RuntimeError, match="SystemExit: bye"):
        pool.call(hostile.quit_politely, timeout=100)
    with pytest.raises(Exception, match=r"Can't (pickle|get) local object"):  # Python 3.13 says get
        pool.call(hostile.unpicklable, timeout=100)


def test_a_hanging_regex_is_killed_in_time_and_the_pool_lives_on(pool: TimeLimitedPool) -> None:
    start = time.perf_counter()
    with pytest.raises(
        TimeoutError, match=r"hostile\.catastrophic did not answer within its limit of 0\.5 seconds"
    ):
        pool.call(hostile.catastrophic, 60, timeout=0.5)
    assert time.perf_counter() - start < 100
    assert pool.call(hostile.add, 1, timeout=100) == 1


def test_workers_are_reused(pool: TimeLimitedPool) -> None:
    assert len({pool.call(hostile.nap, 0.0, timeout=100) for _ in range(5)}) == 1


def test_a_dead_worker_is_named_and_replaced(pool: TimeLimitedPool) -> None:
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        pool.call(hostile.leave, 3, timeout=100)
    assert pool.call(hostile.add, 4, timeout=100) == 4


def test_many_threads_share_few_workers(pool: TimeLimitedPool) -> None:
    with ThreadPoolExecutor(8) as threads:
        pids = set(threads.map(lambda _: pool.call(hostile.nap, 0.05, timeout=100), range(16)))
        assert 1 <= len(pids) <= 2
        hanging = [threads.submit(pool.call, hostile.catastrophic, 60, timeout=0.3) for _ in range(3)]
        fine = [threads.submit(pool.call, hostile.add, number, timeout=100) for number in range(8)]
        assert [future.result() for future in fine] == list(range(8))
        assert all(isinstance(future.exception(), TimeoutError) for future in hanging)


def test_a_kill_reaches_what_the_function_started(
    pool: TimeLimitedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    wait = timelimit._Worker._wait

    def wait_for_the_child(worker: Any, seconds: float, message: str) -> None:
        """The limit passes when the function has started its child."""
        until(lambda: seconds != 0.5 or note.exists())
        wait(worker, seconds, message)

    monkeypatch.setattr(timelimit._Worker, "_wait", wait_for_the_child)
    with pytest.raises(TimeoutError):
        pool.call(hostile.start_child_and_hang, str(note), timeout=0.5)
    pid = int(note.read_text())
    until(lambda: not running(pid))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_function_from_a_users_file(pool: TimeLimitedPool, tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
    )
    assert pool.call(load_attribute(str(file), "compute_score"), "s", "four", None, timeout=100) == 4


def test_a_function_that_the_worker_cannot_import(pool: TimeLimitedPool, tmp_path: Path) -> None:
    file = tmp_path / "vanishing.py"
    file.write_text("def compute_score(text):\n    return 1.0\n")
    function = load_attribute(str(file), "compute_score")
    file.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        pool.call(function, "text", timeout=100)


def test_bad_calls_are_refused_with_the_reason(pool: TimeLimitedPool) -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        pool.call(lambda: 1, timeout=100)
    with pytest.raises(ValueError, match="must be positive, it is 0"):
        pool.call(hostile.add, 1, timeout=0)
    with pytest.raises(ValueError, match="at least one worker"):
        TimeLimitedPool(workers=0)


def test_close_ends_the_workers() -> None:
    with TimeLimitedPool(workers=1) as pool:
        pid = pool.call(hostile.nap, 0.0, timeout=100)
        assert running(pid) and pid != os.getpid()
    assert not running(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.call(hostile.add, 1, timeout=100)
