"""Calls in threads: order, limits, errors; a loop that outlives its calls."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from strop.concurrency import BackgroundLoop, BlockedCalls, call_each
from tests.rewards.limits import limit_items


class Blocked:
    """Calls of one test that hang."""

    def __init__(self) -> None:
        self.calls = BlockedCalls()
        self._earlier = set(threading.enumerate())

    def threads(self) -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if thread.name == "strop-call" and thread not in self._earlier
        ]

    def until_they_return(self) -> None:
        """And their threads have ended, which hold their samples a little longer."""
        deadline = time.monotonic() + 60
        while self.threads():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert self.calls.count == 0


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocked]:
    """Calls that hang in other tests of this process are not counted."""
    found = Blocked()
    monkeypatch.setattr("strop.concurrency.blocked_calls", found.calls)
    yield found
    found.until_they_return()


def test_results_in_order_and_errors_as_results() -> None:
    order: list[int] = []

    def halve(x: int) -> float:
        order.append(x)
        return 10 / x

    found = call_each(halve, [5, 0, 2])
    assert found[0] == 2.0 and found[2] == 5.0 and isinstance(found[1], ZeroDivisionError)
    assert order == [5, 0, 2]
    assert call_each(halve, []) == []


def test_none_is_an_error_and_so_is_leaving() -> None:
    nothing, left = call_each(lambda x: sys.exit("bye") if x else None, [0, 1])
    assert isinstance(nothing, ValueError) and "return" in str(nothing)
    assert isinstance(left, RuntimeError) and "SystemExit: bye" in str(left)


def test_late_calls_are_given_up_and_the_rest_goes_on(
    blocked: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_items(monkeypatch, lambda x: x in (1, 3))
    gate = threading.Event()

    def wait(x: int) -> int:
        if x in (1, 3):
            gate.wait(100)
        return x + 100

    start = time.perf_counter()
    found = call_each(wait, [0, 1, 2, 3, 4], timeout=0.2)
    assert 0.3 < time.perf_counter() - start < 50
    gate.set()
    assert [found[i] for i in (0, 2, 4)] == [100, 102, 104]
    blocked.until_they_return()
    assert all(isinstance(found[i], TimeoutError) and "limit of 0.2 seconds" in str(found[i]) for i in (1, 3))
    assert isinstance(found[1], TimeoutError)  # an answer that comes later changes nothing


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Sample:
    """Something that a weak reference can point to."""


def test_a_call_that_hangs_keeps_its_own_sample_only(
    blocked: Blocked, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time passes during the calls that hang only: on a busy machine any other call may take longer than the
    limit."""
    now = 0.0
    monkeypatch.setattr("strop.concurrency.time", SimpleNamespace(monotonic=lambda: now))
    gate = threading.Event()
    kept: list[weakref.ref[Sample]] = []

    def hang() -> bool:
        nonlocal now
        now += 1.0
        return gate.wait(100)

    for _ in range(10):
        samples = [Sample() for _ in range(20)]
        hangs = samples[7]
        kept += [weakref.ref(sample) for sample in samples]
        call_each(lambda sample, hangs=hangs: hang() if sample is hangs else 1, samples, timeout=0.02)
        del samples, hangs
    # A thread that has made the last call of its round ends a little later than the round.
    until(lambda: len(blocked.threads()) == 10)
    assert blocked.calls.count == 10
    assert sum(reference() is not None for reference in kept) == 10
    assert caplog.text.count("calls exceeded their time limit and have not returned") == 1
    gate.set()
    blocked.until_they_return()
    assert sum(reference() is not None for reference in kept) == 0


def test_no_call_starts_after_the_wait_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal does it: scorers must not go on while the run saves its state."""
    gate = threading.Event()
    begun: list[int] = []

    def score(number: int) -> int:
        begun.append(number)
        while not gate.is_set():
            time.sleep(0.001)
        return number

    def interrupted(condition: threading.Condition, timeout: float | None = None) -> bool:
        while not begun:
            time.sleep(0.001)
            condition.release()
            condition.acquire()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Condition, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call_each(score, range(5))
    gate.set()
    time.sleep(0.1)
    assert begun == [0]


def test_workers_run_side_by_side_but_never_more() -> None:
    running, most, lock = 0, 0, threading.Lock()
    all_three = threading.Barrier(3, timeout=60)

    def busy(_: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        all_three.wait()  # breaks if fewer than three run side by side
        with lock:
            running -= 1
        return 1

    assert call_each(busy, range(12), workers=3, timeout=120) == [1] * 12
    assert most == 3


def test_waiting_before_a_call_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes during the wait only."""
    now = 0.0
    monkeypatch.setattr("strop.concurrency.time", SimpleNamespace(monotonic=lambda: now))

    def before() -> None:
        nonlocal now
        now += 1.0
        time.sleep(0.15)  # the round looks at its calls meanwhile

    assert call_each(lambda x: x, [1, 2], timeout=0.1, before=before) == [1, 2]


def test_a_failing_wait_fails_its_item_only() -> None:
    waits = iter([None, RuntimeError("no"), None])

    def before() -> None:
        error = next(waits)
        if error:
            raise error

    found = call_each(lambda x: x, [1, 2, 3], before=before)
    assert found[0] == 1 and found[2] == 3 and isinstance(found[1], RuntimeError)


def test_many_small_calls_cost_little() -> None:
    start = time.process_time()  # not the wall clock: other processes may have the processor
    assert call_each(lambda x: x + 1, range(5000), timeout=60)[-1] == 5000
    assert time.process_time() - start < 1.0


async def _loop_number() -> int:
    return id(asyncio.get_running_loop())


def test_one_loop_for_all_calls_whoever_asks() -> None:
    loop = BackgroundLoop()
    first = loop.run(_loop_number())

    async def inside() -> Any:
        return loop.run(_loop_number())  # a loop is running in this thread

    assert asyncio.run(inside()) == first == loop.run(_loop_number())
    with pytest.raises(TimeoutError, match=r"limit of 0\.05 seconds"):
        loop.run(asyncio.sleep(20), timeout=0.05)
    loop.close()


async def _leave() -> None:
    sys.exit("bye")


async def _with_a_task_that_leaves() -> str:
    task = asyncio.get_running_loop().create_task(_leave())
    await asyncio.wait([task])
    return type(task.exception()).__name__


def test_leaving_ends_the_call_and_not_the_loop() -> None:
    loop = BackgroundLoop()
    try:
        with pytest.raises(RuntimeError, match="SystemExit: bye"):
            loop.run(_leave(), timeout=60)
        first = loop.run(_loop_number(), timeout=60)
        assert loop.start(_with_a_task_that_leaves()).result(60) == "SystemExit"
        assert loop.run(_loop_number(), timeout=60) == first
    finally:
        loop.close()
