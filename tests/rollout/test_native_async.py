"""Crowds of coroutines at the native engine."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.async_driver import short_switch_interval
from strop.rollout.native.requests import RequestState
from tests.rollout import tiny


def test_thousands_in_flight_keep_the_batch_full() -> None:
    engine = NativeEngine(tiny.make(), max_num_seqs=64)
    engine.generate([Request([1])], Sampling(max_tokens=1))
    engine.stats()

    async def crowd() -> list[list[Completion]]:
        asks = (Request([1 + i % 90, i % 7], max_tokens=2 + i % 5) for i in range(2000))
        return await asyncio.gather(*(engine.agenerate(ask, Sampling()) for ask in asks))

    answers = asyncio.run(crowd())
    assert [len(group[0].ids) for group in answers] == [2 + i % 5 for i in range(2000)]
    numbers = engine.stats()
    assert numbers["tokens"] == 2000 * 4
    assert numbers["occupancy"] > 0.95


def test_conversations_that_answer_at_once_find_their_place_at_the_next_step() -> None:
    """Every coroutine asks again as soon as it has its answer: at most a step's pause between its turns."""
    engine = NativeEngine(tiny.make(), max_num_seqs=32)
    engine.generate([Request([1])], Sampling(max_tokens=1))
    engine.stats()

    async def talk(number: int) -> None:
        for turn in range(4):
            await engine.agenerate(Request([number, turn], max_tokens=8), Sampling())

    async def crowd() -> None:
        await asyncio.gather(*(talk(number) for number in range(64)))

    asyncio.run(crowd())
    numbers = engine.stats()
    assert numbers["tokens"] == 64 * 4 * 8
    assert numbers["occupancy"] > 0.8


def test_an_engine_is_not_starved_by_coroutines_that_compute() -> None:
    """Threads take turns at the interpreter quickly as long as the engine steps, and as usual before and after."""
    engine = NativeEngine(tiny.make(), max_num_seqs=4)
    assert not engine._async_driver.short_calls, "calls take long on a processor"
    engine._async_driver.short_calls = True
    seen: set[float] = set()

    def look(*_: Any) -> None:
        """From the thread that steps: on a busy machine, that of the coroutines may see none of the steps."""
        seen.add(sys.getswitchinterval())

    async def busy() -> list[Completion]:
        asked = asyncio.ensure_future(
            engine.agenerate(Request([1], on_tokens=look), Sampling(max_tokens=20, ignore_eos=True))
        )
        while not asked.done():
            seen.add(sys.getswitchinterval())
            await asyncio.sleep(0)
        return asked.result()

    usual = sys.getswitchinterval()
    [answer] = asyncio.run(busy())
    engine.close()
    assert len(answer.ids) == 20
    assert min(seen) == usual / 10 and sys.getswitchinterval() == usual


def test_turns_are_as_usual_when_the_last_of_several_engines_has_stopped() -> None:
    usual = sys.getswitchinterval()
    first, second = short_switch_interval(), short_switch_interval()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual / 10
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual


def test_a_request_that_comes_while_the_engine_closes_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coroutine would wait forever."""
    engine = NativeEngine(tiny.make())
    engine.generate([Request([1])], Sampling(max_tokens=1))
    submitted: list[RequestState] = []
    abort = engine.abort

    def submit() -> None:
        submitted.append(engine.submit(Request([1, 2]), Sampling(max_tokens=3)))

    thread = threading.Thread(target=submit)

    def abort_and_submit() -> None:
        abort()
        thread.start()
        thread.join(0.2)

    monkeypatch.setattr(engine, "abort", abort_and_submit)
    engine.close()
    thread.join()
    with engine.borrowed_model():
        for _ in range(10):
            engine.step()
    assert submitted[0].done


def test_requests_beside_one_that_cannot_be_read_are_not_computed_later() -> None:
    engine = NativeEngine(tiny.make())
    heard: list[object] = []
    first = Request([1, 2], on_tokens=lambda *tokens: heard.append(tokens))
    with pytest.raises(TypeError):
        engine.generate([first, Request([1, "x"])], Sampling(max_tokens=3))  # type: ignore[list-item] # a text
    engine.generate([Request([1])], Sampling(max_tokens=3))
    assert not heard and engine.idle
