"""Pages: none is lost, none has two writers, and an engine with them samples what one without them does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native import NativeEngine, pages, runner, scheduler, step_loop
from strop.rollout.native.pages import PagedKVCache
from strop.rollout.native.requests import RowPlacement
from tests.rollout import tiny
from tests.rollout.test_native import PER_TOKEN, ids

SIZE = 8
"""Tokens of a page here, so that short sequences have several."""
LONG = [(7 * i * i + 3 * i) % 90 + 1 for i in range(40)]
PROMPTS = [[5, 9, 2], [7, 1, 1, 4, 30, 12, 8, 77], LONG, LONG[:17], [*LONG[:25], 3, 3]]
REQUESTS = [Request(p, n=3, seed=i, max_tokens=10 + 9 * i) for i, p in enumerate(PROMPTS)]


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a GPU, read by plain torch."""
    monkeypatch.setattr(runner, "uses_pages", lambda device: True)
    for module in (pages, scheduler, step_loop):
        monkeypatch.setattr(module, "PAGE", SIZE)


def cache_of(engine: NativeEngine) -> PagedKVCache:
    assert engine._step_loop is not None
    cache = engine._step_loop.runner.cache
    assert isinstance(cache, PagedKVCache)
    return cache


def check(cache: PagedKVCache) -> None:
    """Every page is free or has as many uses as rows; the table shows the running rows."""
    pool = cache.pool
    uses = [0] * pool.size
    for held in pool.pages.values():
        for page in held:
            uses[page] += 1
    assert uses == pool._uses.tolist() and uses[0] == 0
    assert sorted(pool._free) == [page for page in range(1, pool.size) if not uses[page]]


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("more", [{}, {"max_num_seqs": 4}, {"max_num_batched_tokens": 7}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral_window", "gemma2_softcap"])
def test_pages_change_nothing(monkeypatch: pytest.MonkeyPatch, kind: str, more: dict[str, Any]) -> None:
    model = tiny.make(kind)
    engine = NativeEngine(model, **more)
    found = engine.generate(REQUESTS, Sampling())
    check(cache_of(engine))
    monkeypatch.undo()
    assert ids(found) == ids(NativeEngine(model).generate(REQUESTS, Sampling()))


@pytest.mark.usefixtures("paged")
def test_rows_are_preempted_newest_first_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.make()
    monkeypatch.setattr(step_loop, "HEADROOM", 8)
    engine = NativeEngine(model, cache_bytes=(14 + pages.SPARE) * SIZE * PER_TOKEN)
    asked = [Request([3 + i], seed=i, max_tokens=60) for i in range(4)]
    found = engine.generate(asked, Sampling())
    numbers = engine.stats()
    assert numbers["preemptions"] > 0 and numbers["recomputed_tokens"] > 0
    assert 13 <= numbers["pages_used"] <= 15 and numbers["tokens_in_flight"] <= 15 * SIZE
    check(cache_of(engine))
    monkeypatch.undo()
    assert ids(found) == ids(NativeEngine(model).generate(asked, Sampling()))


@pytest.mark.usefixtures("paged")
def test_rows_that_find_no_pages_wait_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler estimates how many pages a row will share: here it always finds that there are enough."""
    model = tiny.make()
    monkeypatch.setattr(scheduler.Scheduler, "_fits_pages", lambda self, free: lambda sample: True)
    engine = NativeEngine(model, cache_bytes=(14 + pages.SPARE) * SIZE * PER_TOKEN)
    sizes = ((LONG, 45), (LONG[:35], 60), (LONG[3:33], 40), (LONG[5:], 50))
    asked = [Request(prompt, seed=i, max_tokens=limit) for i, (prompt, limit) in enumerate(sizes)]
    found = engine.generate(asked, Sampling())
    check(cache_of(engine))
    monkeypatch.undo()
    assert ids(found) == ids(NativeEngine(model).generate(asked, Sampling()))


@pytest.mark.usefixtures("paged")
def test_memory_follows_the_tokens_and_not_the_longest_row() -> None:
    """One long row and many short ones: a rectangle of 8 rows would need 8 x 96 tokens."""
    engine = NativeEngine(tiny.make(), cache_bytes=(24 + pages.SPARE) * SIZE * PER_TOKEN, max_num_seqs=8)
    asked = [Request([1], seed=0, max_tokens=95)] + [Request([2 + i], seed=i, max_tokens=7) for i in range(7)]
    engine.generate(asked, Sampling(ignore_eos=True))
    numbers = engine.stats()
    assert numbers["preemptions"] == 0 and numbers["prompt_tokens"] == 8
    assert numbers["occupancy"] * 94 * 8 == pytest.approx(94 + 7 * 6)  # all ran together


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize(("budget", "grown"), [(24, 26), (100, 27)])
def test_a_cache_that_must_grow_grows_by_a_quarter_within_its_budget(budget: int, grown: int) -> None:
    engine = NativeEngine(tiny.make(), cache_bytes=(budget + pages.SPARE) * SIZE * PER_TOKEN)
    for length, size in ((10, 22), (11, grown)):
        asked = [Request([3 + i], max_tokens=length * SIZE - 1) for i in range(2)]
        engine.generate(asked, Sampling(stop_ids=tuple(range(tiny.VOCABULARY))))
        assert cache_of(engine).pool.size == size


@pytest.mark.usefixtures("paged")
def test_samples_share_the_full_pages_of_their_prompt() -> None:
    engine = NativeEngine(tiny.make())
    state = engine.submit(Request(LONG[:20], n=4, seed=1), Sampling(max_tokens=9))
    with engine.borrowed_model():
        engine.step()
        held = cache_of(engine).pool.pages
        assert len({tuple(held[row][:2]) for row in range(4)}) == 1
        assert len({held[row][2] for row in range(4)}) == 4, "each writes to its own"
        while not state.done:
            engine.step()
    check(cache_of(engine))


@pytest.mark.usefixtures("paged")
def test_what_never_fits_fails_alone_and_a_large_group_takes_turns() -> None:
    engine = NativeEngine(tiny.make(), cache_bytes=(8 + pages.SPARE) * SIZE * PER_TOKEN)
    asked = [
        Request(LONG, max_tokens=40),
        Request([2], max_tokens=5),
        Request(LONG[:30], n=6, seed=3, max_tokens=20),
    ]
    long, short, group = engine.generate(asked, Sampling(ignore_eos=True))
    assert "up to 80 tokens are asked for and the cache holds 64" in (long[0].error or "")
    assert len(short[0].ids) == 5 and [len(c.ids) for c in group] == [20] * 6
    check(cache_of(engine))


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("budget", [20, 60])
def test_conversations_with_pages_go_on_as_without(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    model = tiny.make()
    engine = NativeEngine(model, max_num_seqs=4, cache_bytes=budget * SIZE * PER_TOKEN)
    asked: list[Request] = []
    answered: list[Completion] = []

    async def talk(number: int) -> None:
        tokens = [*LONG[:21], *([number] * (number % 3))]
        for turn in range(4):
            request = Request(list(tokens), seed=10 * number + turn)
            (answer,) = await engine.agenerate(request, Sampling(max_tokens=1 + (number + turn) % 7))
            asked.append(request)
            answered.append(answer)
            tokens += [*answer.ids, 17, 3, 88]

    async def crowd() -> None:
        await asyncio.gather(*(talk(number) for number in range(7)))

    asyncio.run(crowd())
    check(cache_of(engine))
    assert engine.stats()["prefix_reuse"] > 0.4
    monkeypatch.undo()
    plain = NativeEngine(model, enable_prefix_caching=False)
    for request, answer in zip(asked, answered):
        (alone,) = plain.generate([request], Sampling(max_tokens=len(answer.ids)))[0]
        assert alone.ids == answer.ids
        assert torch.allclose(torch.tensor(alone.log_probs), torch.tensor(answer.log_probs), atol=1e-4)


@pytest.mark.usefixtures("paged")
def test_after_new_weights_or_an_abort_no_page_is_held() -> None:
    engine = NativeEngine(tiny.make(), enable_prefix_caching=False)
    engine.submit(Request(LONG, n=3), Sampling(max_tokens=30))
    with engine.borrowed_model():
        engine.step()
        engine.update_weights([], version=1)
        assert not cache_of(engine).pool.pages
        engine.step()
        assert len(cache_of(engine).pool.pages) == 3
        engine.abort()
        engine.step()
    assert not cache_of(engine).pool.pages and not cache_of(engine).table.any()
    check(cache_of(engine))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_placing_moving_and_leaving_keeps_the_books(data: st.DataObject) -> None:
    cache = PagedKVCache({0: (1, 2, 2)}, dtype=torch.float32, device=torch.device("cpu"))
    cache.resize_pool(data.draw(st.integers(3, 20)))
    cache.resize_table(4, 4 * pages.PAGE)
    lengths: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["place", "grow", "move", "leave"]))
        rows = sorted(lengths)
        if action == "place" and len(rows) < 4:
            row = len(rows)
            length = data.draw(st.integers(1, 4 * pages.PAGE))
            source = data.draw(st.sampled_from([None, *rows]))
            shared = 0 if source is None else min(length - 1, lengths[source])
            if cache.place([RowPlacement(row, length, source, shared)], [], 0, lambda: None):
                lengths[row] = length
                assert len(cache.pool.pages[row]) == pages.pages_for(length)
                last = cache.pool.pages[row][-1]
                assert cache.pool._uses[last] == 1 or length % pages.PAGE == 0, "it is written to"
        elif action == "grow" and rows:
            wanted = [min(4 * pages.PAGE, lengths[row] + 70) for row in rows]
            if cache.reserve(wanted, lambda: None):
                lengths = dict(zip(rows, wanted))
        elif action == "move" and len(rows) > 1:
            cache.move([(rows[-1], 0)], 0)
            lengths[0] = lengths.pop(rows[-1])
        elif action == "leave" and rows:
            del lengths[rows[-1]]
        cache.keep(len(lengths), ())
        check(cache)
        assert sorted(cache.pool.pages) == sorted(lengths)
