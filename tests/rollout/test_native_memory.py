"""The cache never takes what is not there, and whoever has to give way loses nothing."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine, step_loop
from strop.rollout.native import meter as memory
from strop.rollout.native.cuda_graphs import graph_rows
from strop.rollout.native.kv_cache import KVCache
from tests.rollout import tiny
from tests.rollout.test_native import PER_TOKEN, PROMPTS, ids

REQUESTS = [Request(p, n=2, seed=i, max_tokens=10 + 12 * i) for i, p in enumerate(PROMPTS)]


def small_device(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """A device that runs out of memory, in the middle of growing, when the cache is to hold more than `tokens`."""
    resize = KVCache.resize
    failed = False

    def limited(self: KVCache, rows: int, capacity: int, keep: int) -> None:
        nonlocal failed
        assert not (failed and self.bytes), "the smaller cache takes its place, not memory besides it"
        failed = rows * capacity > tokens
        if failed:
            self.tensors.keys.pop(0, None)
            raise torch.OutOfMemoryError("CUDA out of memory")
        resize(self, rows, capacity, keep)

    monkeypatch.setattr(KVCache, "resize", limited)


@pytest.mark.parametrize("tokens", [150, 400, 700])
def test_a_cache_that_cannot_grow_grows_less(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    model = tiny.make()
    expected = NativeEngine(model).generate(REQUESTS, Sampling())
    small_device(monkeypatch, tokens)
    engine = NativeEngine(model)
    assert ids(engine.generate(REQUESTS, Sampling())) == ids(expected)
    assert engine.stats()["out_of_memory"] > 0
    assert ids(engine.generate(REQUESTS, Sampling())) == ids(expected)
    assert engine.stats()["out_of_memory"] == 0, "the limit was learnt"


@pytest.mark.parametrize("number", [1, 2, 9, 30])
def test_a_pass_that_runs_out_of_memory_is_done_again(number: int) -> None:
    model = tiny.make()
    expected = NativeEngine(model).generate(REQUESTS, Sampling())
    engine = NativeEngine(model)
    engine.generate([Request([1])], Sampling(max_tokens=1))
    calls = 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(hook)
    assert engine._step_loop is not None
    runner = engine._step_loop.runner
    most = runner.batch_tokens
    assert ids(engine.generate(REQUESTS, Sampling())) == ids(expected)
    assert engine.stats()["out_of_memory"] == 1 and runner.batch_tokens == max(64, most // 2)


@pytest.mark.parametrize("number", range(4, 20, 3))
def test_rows_that_ended_before_the_failing_step_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """On a GPU several decode steps run before the host looks which rows have ended."""
    model = tiny.make()
    plain = NativeEngine(model).generate(REQUESTS, Sampling())
    stops = Sampling(stop_ids=(plain[3][0].ids[4],))
    expected = NativeEngine(model).generate(REQUESTS, stops)
    assert {c.finish for group in expected for c in group} == {"stop", "length"}
    monkeypatch.setitem(step_loop.STEPS_PER_SYNC, "cpu", 16)
    engine = NativeEngine(model)
    engine.generate([Request([1])], Sampling(max_tokens=1))
    calls = 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert calls < 400, "rows beyond their limit never end"

    model.register_forward_pre_hook(hook)
    found = engine.generate(REQUESTS, stops)
    assert engine.stats()["out_of_memory"] == 1
    assert ids(found) == ids(expected)
    assert [[c.finish for c in group] for group in found] == [[c.finish for c in group] for group in expected]


def test_what_does_not_fit_the_device_at_all_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small_device(monkeypatch, 70)
    engine = NativeEngine(tiny.make())
    long, short = engine.generate([Request([1] * 60, max_tokens=60), Request([2], max_tokens=5)], Sampling())
    assert long[0].finish == "error" and "out of memory on cpu: up to 120 tokens" in (long[0].error or "")
    assert len(short[0].ids) == 5


def test_a_device_without_any_memory_fails_every_request_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    small_device(monkeypatch, 0)
    answers = NativeEngine(tiny.make()).generate(REQUESTS, Sampling())
    assert {c.finish for group in answers for c in group} == {"error"}


@pytest.mark.parametrize("budget", [130, 200, 333])
def test_the_cache_stays_within_its_budget_all_the_time(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    sizes: list[int] = []
    resize = KVCache.resize

    def watched(self: KVCache, rows: int, capacity: int, keep: int) -> None:
        resize(self, rows, capacity, keep)
        sizes.append(self.bytes)

    model = tiny.make()
    expected = NativeEngine(model).generate(REQUESTS, Sampling())
    monkeypatch.setattr(KVCache, "resize", watched)
    engine = NativeEngine(model, cache_bytes=budget * PER_TOKEN)
    assert ids(engine.generate(REQUESTS, Sampling())) == ids(expected)
    assert 0 < max(sizes) <= budget * PER_TOKEN


def test_a_cache_whose_contents_are_not_kept_is_freed_before_the_next_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = KVCache({0: (2, 4, 4), 1: (2, 4, 4)}, dtype=torch.float32, device=torch.device("cpu"))
    cache.resize(2, 8, keep=0)
    zeros = torch.zeros
    held: list[Any] = []

    def watched(*size: int, **more: Any) -> torch.Tensor:
        held.append(old())
        return zeros(*size, **more)

    monkeypatch.setattr(torch, "zeros", watched)
    for keep, stays in ((2, True), (0, False)):
        old = weakref.ref(cache.tensors.keys[0])
        cache.resize(3, 9, keep)
        assert (held[0] is not None) == stays
        held.clear()


def test_the_budget_on_a_gpu_is_a_share_of_the_device_less_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.make()
    weights = sum(w.numel() * w.element_size() for w in model.parameters())
    device = torch.device("cuda")
    state = {"free": 80_000_000, "total": 100_000_000}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (state["free"], state["total"]))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5_000_000)
    assert memory.cache_memory(model, device, 0.5) == 50_000_000 - weights
    assert memory.cache_memory(model, device, 0.5, copies=1_000_000) == 49_000_000 - weights
    assert memory.cache_memory(model, device, 0.0) == 0
    monkeypatch.setattr(memory, "host_memory", lambda: 1000)
    assert memory.cache_memory(model, torch.device("cpu"), 0.5) == 250
    state["free"] = 10_000_000
    assert memory.cache_memory(model, device, 0.5) == int(12_000_000 * 0.9), "no more than is free"
    assert memory.cache_memory(model, device, 0.5, held=5_000_000) == int(17_000_000 * 0.9), (
        "what it has counts as free"
    )
    assert memory.may_stay(device) and not memory.may_stay(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 25_000_001)
    assert not memory.may_stay(device)


def test_decode_steps_are_counted_by_their_rows_and_their_memory_by_its_maximum() -> None:
    meter = memory.Meter()
    for steps, rows, tokens in ((1, 8, 30), (2, 9, 80), (4, 256, 50), (8, 257, 10)):
        meter.decoded(steps, rows, memory.CacheUse(tokens, 100, pages=rows))
    meter.admitted(30, 40)
    found = meter.read(max_num_seqs=512)
    assert [found[f"steps_to_{rows}_rows"] for rows in (8, 64, 256)] == [1, 2, 4]
    assert found["steps_of_more_rows"] == 8 and found["prefix_reuse"] == 0.25
    assert found["occupancy"] == (8 + 2 * 9 + 4 * 256 + 8 * 257) / (15 * 512)
    assert (found["cache_use"], found["tokens_in_flight"], found["pages_used"]) == (0.8, 80, 257)
    assert not any(meter.read(512).values()), "counted from the last reading"


def test_a_cache_with_recorded_steps_stays_when_the_engine_sleeps_until_memory_is_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = NativeEngine(tiny.make())
    engine.generate([Request([1])], Sampling(max_tokens=2))
    assert engine._step_loop is not None
    cache = engine._step_loop.runner.cache
    size = cache.bytes
    monkeypatch.setattr("strop.rollout.native.runner.Runner.num_recorded", 1)
    assert not engine.release_memory(), "it is awake"
    monkeypatch.setattr("strop.rollout.native.engine.may_stay", lambda device: True)
    engine.sleep()
    assert cache.bytes == size > 0
    engine.wake()
    assert not engine.release_memory() and cache.bytes == size, "it may be in use"
    monkeypatch.setattr("strop.rollout.native.engine.may_stay", lambda device: False)
    engine.sleep()
    assert cache.bytes == 0 and not engine.release_memory()
    monkeypatch.setattr("strop.rollout.native.engine.may_stay", lambda device: True)
    for stays in (True, False):
        engine.wake()
        engine.generate([Request([1])], Sampling(max_tokens=2))
        engine.sleep()
        assert (cache.bytes > 0) == stays and engine.release_memory() == stays, (
            "once it was let go, it is never kept again"
        )
        assert cache.bytes == 0


def test_memory_is_measured_anew_when_the_cache_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Any = iter([50 * PER_TOKEN, 200 * PER_TOKEN])
    monkeypatch.setattr("strop.rollout.native.borrowed_model.cache_memory", lambda *_: next(sizes))
    engine = NativeEngine(tiny.make())
    (answer,) = engine.generate([Request([1] * 40, max_tokens=60)], Sampling())[0]
    assert "the cache holds 50" in (answer.error or "")
    engine.sleep()
    (answer,) = engine.generate([Request([1] * 40, max_tokens=60)], Sampling())[0]
    assert len(answer.ids) == 60


def test_memory_is_measured_anew_when_an_engine_wakes_with_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer took some meanwhile: the cache may not grow any more, and is used as it is."""
    held: list[int] = []
    sizes: Any = iter([600 * PER_TOKEN, 100 * PER_TOKEN])
    monkeypatch.setattr(
        "strop.rollout.native.borrowed_model.cache_memory",
        lambda *asked: held.append(asked[3]) or next(sizes),
    )
    engine = NativeEngine(tiny.make())
    first = ids(engine.generate(REQUESTS, Sampling()))
    assert first == ids(engine.generate(REQUESTS, Sampling())) and len(held) == 1, "not while it is awake"
    engine.wake()
    assert ids(engine.generate(REQUESTS, Sampling())) == first
    assert engine._step_loop is not None and 0 == held[0] < held[1]
    cache = engine._step_loop.runner.cache
    assert 100 < engine._step_loop.scheduler.budget == cache.rows * cache.capacity == held[1] // PER_TOKEN


@pytest.mark.parametrize(
    ("rows", "size"),
    [(1, 1), (3, 4), (17, 24), (97, 128), (129, 160), (224, 224), (257, 320), (513, 640), (1000, 1024)],
)
def test_a_recorded_step_has_few_idle_rows(rows: int, size: int) -> None:
    assert graph_rows(rows, 4096) == size
    assert graph_rows(rows, rows) == rows  # never more than the cache has
