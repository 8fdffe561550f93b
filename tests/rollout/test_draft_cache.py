"""The KV cache of a draft model: memory follows the lengths of the rows, within a limit."""

from __future__ import annotations

from pathlib import Path

import torch

from strop.rollout.base import Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.pages import PAGE, SPARE, pages_for
from strop.rollout.native.speculation.draft_cache import DraftCache
from tests.rollout import tiny
from tests.rollout.test_native_draft_model import drafted
from tests.rollout.test_native_speculation import REQUESTS, assert_same


def empty() -> DraftCache:
    return DraftCache({0: (2, 8, 8)}, dtype=torch.float32, device=torch.device("cpu"))


def test_memory_follows_the_sum_of_the_lengths() -> None:
    cache = empty()
    resized = []
    cache.before_resize = lambda: resized.append(cache.pool.size)
    cache.fit(64, 32768)
    lengths = [5000, *[100] * 20]
    for ahead in range(0, 4000, 8):
        assert all(cache.hold([length + ahead for length in lengths]))
        needed = sum(pages_for(length + ahead) for length in lengths)
        assert cache.pool.num_used == needed and cache.pool.size <= 1.5 * (needed + SPARE)
    assert cache.bytes == sum(tensor.nbytes for tensor in cache.tensors.all)
    assert cache.bytes < 0.1 * 64 * 32768 * cache.bytes_per_token, "a rectangle would hold this"
    assert len(resized) < 12, "recorded passes are dropped only a few times"
    cache.hold([100])
    assert cache.pool.num_used == 2, "pages of rows that are gone are free"


def test_a_limit_divides_memory_into_caches_of_as_many_tokens() -> None:
    cache = empty()
    own = cache.limit(1 << 20, per_token=3 * cache.bytes_per_token, most_tokens=1 << 30)
    tokens = ((1 << 20) - own) // (3 * cache.bytes_per_token)
    assert own <= (1 << 20) // 4 + SPARE * PAGE * cache.bytes_per_token
    assert tokens - PAGE < (own // cache.bytes_per_token - SPARE * PAGE) <= tokens + (SPARE + 1) * PAGE
    assert cache.limit(1 << 20, cache.bytes_per_token, most_tokens=200) == 5 * PAGE * cache.bytes_per_token


def test_rows_without_pages_are_not_followed_and_touch_no_other_row() -> None:
    cache = empty()
    cache.most_pages = 4
    cache.fit(4, 256)
    assert cache.hold([100, 150, 60]) == [True, False, True]
    assert cache.followed.tolist() == [True, False, True, False]
    assert cache.table[1].tolist() == [0, 0, 0, 0], "it writes to the page that no row has"
    pages = cache.table[cache.table > 0].tolist()
    assert len(set(pages)) == len(pages) == 3
    cache.move([(2, 0)], 0)
    assert cache.hold([60, 100]) == [True, True]


def test_tokens_do_not_depend_on_how_many_rows_are_followed(tmp_path: Path) -> None:
    model = tiny.make()
    expected = NativeEngine(model).generate(REQUESTS, Sampling(temperature=0))
    counts = []
    for pages in (SPARE, SPARE + 2, None):
        engine = drafted(model, model, tmp_path, cache_bytes=1 << 24)
        engine._ready().runner._drafts.cache.most_pages = pages
        assert_same(engine.generate(REQUESTS, Sampling(temperature=0)), expected)
        stats = engine.stats()
        assert stats["speculation/acceptance"] > 0.9, "the end of an answer cuts drafts of the last pass"
        counts.append(stats["speculation/drafted"])
    assert 0 < counts[0] < counts[1] < counts[2]
