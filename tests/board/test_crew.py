"""Searches do not hold up pages, and nobody works for a reader who has gone."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from strop.board.crew import GONE, SEARCHING, Crew
from strop.board.samples import SampleFolder
from tests.board.scene import serving, write_run
from tests.board.test_app import ask, runs


class Reader:
    def __init__(self, gone: bool = False):
        self.gone = gone

    async def is_disconnected(self) -> bool:
        return self.gone


def test_no_more_are_at_work_than_the_crew_has_and_those_who_left_get_nothing() -> None:
    busy, most, asked = 0, 0, []
    lock = threading.Lock()

    def work(name: int) -> tuple[int, str]:
        nonlocal busy, most
        with lock:
            busy, most = busy + 1, max(most, busy + 1)
            asked.append(name)
        time.sleep(0.02)
        with lock:
            busy -= 1
        return 200, str(name)

    async def all_at_once() -> list[tuple[int, str]]:
        crew = Crew(3)
        return await asyncio.gather(*(crew.answer(lambda i=i: work(i), Reader(i % 4 == 3)) for i in range(20)))

    answers = asyncio.run(all_at_once())
    assert answers == [GONE if i % 4 == 3 else (200, str(i)) for i in range(20)]
    assert most == 3 and sorted(asked) == [i for i in range(20) if i % 4 != 3]


def test_pages_are_answered_while_searches_take_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "one")
    over, begun = threading.Event(), threading.Semaphore(0)

    def scan(*_: Any) -> dict[str, Any]:
        begun.release()
        over.wait(20)
        return {"groups": [], "left": 0, "next": None}

    monkeypatch.setattr(SampleFolder, "scan", scan)
    with serving(tmp_path) as url:
        base = f"/api/runs/{runs(url)['one']['id']}/samples/train"
        searches = [threading.Thread(target=ask, args=(url, f"{base}?search=x{i}")) for i in range(5 * SEARCHING)]
        for search in searches:
            search.start()
        for _ in range(SEARCHING):
            assert begun.acquire(timeout=10)
        start = time.monotonic()
        assert ask(url, f"{base}?step=40")[0] == ask(url, "/api/runs")[0] == 200
        assert time.monotonic() - start < 5 and not begun.acquire(timeout=0.1)
        over.set()
        for search in searches:
            search.join(20)
