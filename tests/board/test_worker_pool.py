"""Searches do not hold up pages, and nobody works for a reader who has gone."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strop.board.sample_pages import SampleFolder
from strop.board.worker_pool import (
    CLIENT_CLOSED_REQUEST,
    MAX_SEARCH_SECONDS,
    MIN_SEARCH_SECONDS,
    SEARCH_THREADS,
    TARGET_LATENCY_SECONDS,
    WorkerPool,
)
from tests.board.scene import serving, write_run
from tests.board.test_app import ask, runs


class Reader:
    def __init__(self, gone: bool = False):
        self.gone = gone

    async def is_disconnected(self) -> bool:
        return self.gone


def test_no_more_are_at_work_than_the_crew_has_and_those_who_left_get_nothing() -> None:
    busy, most, asked = 0, 0, []
    lock, all_three = threading.Lock(), threading.Barrier(3)

    def work(name: int, turn: float) -> tuple[int, str]:
        nonlocal busy, most
        with lock:
            busy, most = busy + 1, max(most, busy + 1)
            asked.append(name)
        all_three.wait(60)  # breaks if fewer are at work
        with lock:
            busy -= 1
        return 200, str(name)

    async def all_at_once() -> list[tuple[int, str]]:
        crew = WorkerPool(3)
        return await asyncio.gather(
            *(crew.answer(str(i), partial(work, i), Reader(i % 4 == 3)) for i in range(20))
        )

    answers = asyncio.run(all_at_once())
    assert answers == [CLIENT_CLOSED_REQUEST if i % 4 == 3 else (200, str(i)) for i in range(20)]
    assert most == 3 and sorted(asked) == [i for i in range(20) if i % 4 != 3]


def test_the_same_question_is_answered_once_for_all_who_ask_meanwhile() -> None:
    answered, over = [], threading.Event()

    def work(turn: float) -> tuple[int, str]:
        answered.append(turn)
        over.wait(60)
        return 200, "all"

    async def ask_together() -> list[tuple[int, str]]:
        crew = WorkerPool(1)
        asked = [asyncio.create_task(crew.answer("same", work, Reader())) for _ in range(10)]
        await asyncio.sleep(0.05)
        over.set()
        first = await asyncio.gather(*asked)
        return [*first, await crew.answer("same", work, Reader())]

    assert asyncio.run(ask_together()) == 11 * [(200, "all")] and len(answered) == 2


def test_a_shared_question_is_dropped_only_when_all_have_gone() -> None:
    begun = []

    async def ask(*gone: bool) -> list[tuple[int, str]]:
        crew = WorkerPool(1)
        hold = threading.Event()
        first = asyncio.create_task(crew.answer("first", lambda _: (200, str(hold.wait(60))), Reader()))
        await asyncio.sleep(0.01)
        waiting = [
            asyncio.create_task(crew.answer("x", lambda _: (200, str(begun.append("x"))), Reader(left)))
            for left in gone
        ]
        await asyncio.sleep(0.01)
        hold.set()
        await first
        return await asyncio.gather(*waiting)

    assert asyncio.run(ask(True, False)) == 2 * [(200, "None")] and begun == ["x"]
    assert asyncio.run(ask(True, True)) == 2 * [CLIENT_CLOSED_REQUEST] and begun == ["x"]


def test_a_question_that_fails_is_told_to_all_and_can_be_asked_again() -> None:
    def fails(turn: float) -> tuple[int, str]:
        raise OSError("no disk")

    async def ask() -> list[Any]:
        crew = WorkerPool(1)
        failed = await asyncio.gather(
            *(crew.answer("x", fails, Reader()) for _ in range(2)), return_exceptions=True
        )
        return [*map(str, failed), await crew.answer("x", lambda _: (200, "again"), Reader())]

    assert asyncio.run(ask()) == ["no disk", "no disk", (200, "again")]


def test_turns_become_shorter_the_more_wait() -> None:
    turns: list[float] = []

    def work(turn: float) -> tuple[int, str]:
        turns.append(turn)
        return 200, ""

    async def ask(count: int) -> None:
        crew = WorkerPool(2)
        await asyncio.gather(*(crew.answer(str(i), work, Reader()) for i in range(count)))

    asyncio.run(ask(1))
    assert turns == [MAX_SEARCH_SECONDS]
    turns.clear()
    asyncio.run(ask(40))
    assert (
        turns[0] == pytest.approx(2 * TARGET_LATENCY_SECONDS / 40)
        and sum(turns[:20]) < TARGET_LATENCY_SECONDS + MAX_SEARCH_SECONDS
    )
    turns.clear()
    asyncio.run(ask(1000))
    assert min(turns) == MIN_SEARCH_SECONDS


def test_pages_are_answered_while_searches_take_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "one")
    over, begun = threading.Event(), threading.Semaphore(0)

    def scan(*_: Any) -> dict[str, Any]:
        begun.release()
        over.wait(200)
        return {"groups": [], "left": 0, "next": None}

    monkeypatch.setattr(SampleFolder, "scan", scan)
    with serving(tmp_path) as url:
        base = f"/api/runs/{runs(url)['one']['id']}/samples/train"
        searches = [
            threading.Thread(target=ask, args=(url, f"{base}?search=x{i}")) for i in range(5 * SEARCH_THREADS)
        ]
        for search in searches:
            search.start()
        for _ in range(SEARCH_THREADS):
            assert begun.acquire(timeout=60)
        start = time.monotonic()
        assert ask(url, f"{base}?step=40")[0] == ask(url, "/api/runs")[0] == 200
        assert time.monotonic() - start < 60 and not begun.acquire(timeout=0.1)
        over.set()
        for search in searches:
            search.join(60)
