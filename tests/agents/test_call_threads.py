"""Blocking calls of coroutines: quick ones share threads, slow ones do not wait for each other, and a call that was
given up before it began never begins."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from strop.agents.call_threads import AbandonableThreads
from strop.concurrency import BackgroundLoop, call_soon_in


def test_quick_calls_share_a_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, a pause looks like calls that block.
    monkeypatch.setattr("strop.agents.call_threads.PATIENCE", 100.0)
    threads = AbandonableThreads("test")
    used: set[int] = set()

    def square(n: int) -> int:
        used.add(threading.get_ident())
        return n * n

    async def many() -> list[int]:
        return list(await asyncio.gather(*(threads.call(square, {"n": n}) for n in range(500))))

    assert asyncio.run(many()) == [n * n for n in range(500)]
    assert len(used) < 50


def test_slow_calls_run_at_the_same_time() -> None:
    """All wait for the last one: with too few threads they would wait for ever."""
    threads = AbandonableThreads("test")
    barrier = threading.Barrier(40)

    async def all_of_them() -> list[int]:
        return list(await asyncio.gather(*(threads.call(barrier.wait, {"timeout": 60}) for _ in range(40))))

    assert sorted(asyncio.run(all_of_them())) == list(range(40))


def test_calls_of_another_event_loop_get_threads_too() -> None:
    """The loop that watched over waiting calls was closed while one of them hung."""
    threads = AbandonableThreads("test")
    hangs = threading.Event()

    async def begin(count: int, timeout: float) -> None:
        calls = (threads.call(hangs.wait, {"timeout": 100}) for _ in range(count))
        await asyncio.wait_for(asyncio.gather(*calls), timeout)

    with pytest.raises(TimeoutError):
        asyncio.run(begin(3, 0.001))
    barrier = threading.Barrier(5)

    async def again() -> None:
        await asyncio.gather(*(threads.call(barrier.wait, {"timeout": 60}) for _ in range(5)))

    asyncio.run(again())
    hangs.set()


def test_a_call_that_was_given_up_in_the_queue_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = AbandonableThreads("test")
    ran: list[str] = []

    async def run() -> None:
        with monkeypatch.context() as no_thread:
            no_thread.setattr(threads, "_add_threads", lambda count: None)
            given_up = asyncio.ensure_future(
                threads.call(lambda name: ran.append(name), {"name": "given up"})
            )
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.wait([given_up])
        assert threads.abandoned == 0
        await threads.call(lambda name: ran.append(name), {"name": "another"})

    asyncio.run(run())
    assert ran == ["another"]


def test_a_call_for_which_no_thread_can_be_started_fails_and_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = AbandonableThreads("test")
    ran: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            asyncio.run(threads.call(lambda name: ran.append(name), {"name": "refused"}))
    asyncio.run(threads.call(lambda name: ran.append(name), {"name": "another"}))
    assert ran == ["another"] and threads.abandoned == 0


def test_calls_into_a_loop_keep_their_order_and_share_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundLoop("test")
    made: list[int] = []
    done = threading.Event()

    async def own() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    loop = background.run(own())
    wake_ups = 0
    plain = loop.call_soon_threadsafe

    def counted(*call: Any) -> Any:
        nonlocal wake_ups
        wake_ups += 1
        return plain(*call)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    blocked = threading.Event()
    loop.call_soon_threadsafe(blocked.wait, 60)  # the loop is busy
    for n in range(100):
        call_soon_in(loop, lambda n=n: made.append(n))  # type: ignore[misc]
    call_soon_in(loop, done.set)
    blocked.set()
    assert done.wait(60)
    assert made == list(range(100))
    assert wake_ups == 2  # the one that blocks, and one for all
    background.close()
