"""Random requests, limits, aborts and weight updates: every answer is that of the request alone, and all memory
is free in the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native import NativeEngine, pages, runner, scheduler, step_loop
from strop.rollout.native.pages import PagedKVCache
from strop.rollout.native.requests import RequestState
from tests.rollout import tiny

PER_TOKEN = 2 * 2 * 16 * 8  # layers, keys and values, 2 heads of 8, bytes of float64
LONGEST = 80
ADAPTERS = ("a", "b")
_MODULES = {"model.layers.0.self_attn.q_proj": (32, 32), "model.layers.1.mlp.down_proj": (48, 32)}


def like_a_gpu(monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
    """Small pages, several steps between two looks at the rows, next turns that join decode steps."""
    monkeypatch.setattr(runner, "uses_pages", lambda device: True)
    for module in (pages, scheduler, step_loop):
        monkeypatch.setattr(module, "PAGE", 8)
    monkeypatch.setattr(step_loop, "HEADROOM", chance.choice([0, 8, 32]))
    monkeypatch.setitem(step_loop.STEPS_PER_SYNC, "cpu", chance.choice([1, 3, 7]))
    monkeypatch.setitem(step_loop._MAX_DECODE_PREFILL, "cpu", chance.choice([0, 12, 40]))
    monkeypatch.setitem(step_loop.MIN_ADMIT_SHARE, "cpu", chance.choice([0.0, 0.5]))


def load_adapters(engine: NativeEngine) -> None:
    for number, name in enumerate(ADAPTERS):
        generator = torch.Generator().manual_seed(number)
        weights = {}
        for path, (inputs, outputs) in _MODULES.items():
            weights[f"{path}.lora_A"] = torch.randn(2 + number, inputs, generator=generator)
            weights[f"{path}.lora_B"] = torch.randn(outputs, 2 + number, generator=generator)
        engine.load_adapter(name, weights, 0.2)


@dataclass
class Asked:
    request: Request
    sampling: Sampling
    breaks: bool
    """Its callback raises."""
    heard: dict[int, list[int]] = field(default_factory=dict)
    aborted: bool = False
    state: RequestState | None = None

    def on_tokens(self, sample: int, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        assert len(ids) == len(log_probs) > 0
        if self.breaks:
            raise ValueError("broken callback")
        self.heard.setdefault(sample, []).extend(ids)


class Crowd:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._begins = [self._tokens(chance.choice([1, 5, 16, 17, 33, 60])) for _ in range(4)]
        self._ways = [self._way() for _ in range(4)]

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(tiny.VOCABULARY) for _ in range(count)]

    def _way(self) -> Sampling:
        pick = self._chance.choice
        return Sampling(
            temperature=pick([0, 0.7, 1, 1.5]),
            top_k=pick([0, 0, 1, 5, 1000]),
            top_p=pick([1, 0.9, 1e-40]),
            min_p=pick([0, 0, 0.1, 1]),
            repetition_penalty=pick([1, 1, 1.3, 0.7]),
            max_tokens=pick([1, 2, 10, 30]),
            stop_ids=tuple(self._tokens(pick([0, 1, 5]))),
            ignore_eos=pick([False, False, True]),
        )

    def ask(self, earlier: Sequence[list[int]]) -> Asked:
        chance = self._chance
        ids = list(chance.choice(self._begins))
        if earlier and chance.random() < 0.4:  # the next turn of a conversation
            ids = [*chance.choice(earlier), *self._tokens(chance.choice([1, 3, 20]))]
        elif chance.random() < 0.4:
            ids = [*ids[: chance.randrange(len(ids) + 1)], *self._tokens(chance.randrange(4))]
        if chance.random() < 0.05:
            ids.append(tiny.VOCABULARY)
        request = Request(
            ids[: LONGEST + 3],
            n=chance.choice([1, 1, 2, 5]),
            seed=chance.randrange(1 << 40),
            first=chance.choice([0, 0, 2]),
            max_tokens=chance.choice([None, None, 0, 1, 30]),
            adapter=chance.choice([None, None, *ADAPTERS]),
        )
        asked = Asked(request, chance.choice(self._ways), breaks=chance.random() < 0.05)
        if asked.breaks or chance.random() < 0.4:
            asked.request = replace(request, on_tokens=asked.on_tokens)
        return asked


def run(engine: NativeEngine, chance: random.Random, count: int) -> list[Asked]:
    """So many requests, which come, are aborted, and see new versions of the weights at any step."""
    crowd = Crowd(chance)
    every: list[Asked] = []
    steps = 0
    with engine.borrowed_model():
        while len(every) < count or not engine.idle:
            while len(every) < count and chance.random() < 0.5:
                earlier = [
                    [*one.request.ids, *answer.ids]
                    for one in every[-8:]
                    if one.state is not None and one.state.complete and one.state.error is None
                    for answer in one.state.result()
                    if answer.finish != "error"
                ]
                asked = crowd.ask(earlier)
                asked.state = engine.submit(asked.request, asked.sampling, multi_turn=chance.random() < 0.5)
                every.append(asked)
            what = chance.random()
            if what < 0.02:
                engine.update_weights([], engine.version + 1)
            elif what < 0.05 and every:
                abort(engine, [chance.choice(every)])
            elif what < 0.055:
                abort(engine, every)
            engine.step()
            steps += 1
            assert steps < 5000, "it does not end"
    return every


def abort(engine: NativeEngine, some: Sequence[Asked]) -> None:
    for one in some:
        if one.state is not None and not one.state.done:
            one.aborted = True
            engine.cancel(one.state)


def check(asked: Asked, alone: Sequence[Completion]) -> None:
    assert asked.state is not None and asked.state.done
    if asked.breaks and asked.state.error is not None:
        assert "broken callback" in str(asked.state.error)
        return
    for index, (found, expected) in enumerate(zip(asked.state.result(), alone, strict=True)):
        if "the cache holds" in str(found.error):
            continue
        if found.finish == "abort":
            assert asked.aborted
            count = len(found.ids)
            expected = replace(expected, ids=expected.ids[:count], log_probs=expected.log_probs[:count])
        else:
            assert found.finish == expected.finish
        assert found.ids == expected.ids
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
        assert not found.versions or sum(tokens for _, tokens in found.versions) == len(found.ids)
        if asked.request.on_tokens is not None:
            assert asked.heard.get(index, []) == found.ids


def check_memory(engine: NativeEngine) -> None:
    assert not engine._requests and engine._step_loop is not None
    loop = engine._step_loop
    cache = loop.runner.cache
    if isinstance(cache, PagedKVCache):
        held = {page for own in cache.pool.pages.values() for page in own}
        assert cache.pool.num_used == len(held) and set(cache.pool.pages) <= set(
            loop.scheduler.prefix_cache.finished
        )
    engine.wake()  # forgets finished sequences
    assert not loop.scheduler.prefix_cache._by_hash and not loop.scheduler.prefix_cache._by_tokens
    if isinstance(cache, PagedKVCache):
        assert cache.pool.num_used == 0 and not any(cache.pool.pages.values())


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_gets_what_each_would_get_alone_and_leaves_no_memory_behind(
    seed: int, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    model: Any = tiny.make("qwen2").double()  # in which rounding decides nothing
    alone = NativeEngine(model, max_model_len=LONGEST, max_num_seqs=1, enable_prefix_caching=False)
    load_adapters(alone)
    with monkeypatch.context() as patches:
        if paged:
            like_a_gpu(patches, chance)
        speculation = SpeculationConfig(enable=True, num_tokens=3, max_rows=4) if seed % 2 else None
        engine = NativeEngine(
            model,
            max_model_len=LONGEST,
            max_num_seqs=chance.choice([2, 5, 16]),
            max_num_batched_tokens=chance.choice([7, 16, None]),
            cache_bytes=chance.choice([70, 120, 300]) * PER_TOKEN,
            speculation=speculation,
        )
        load_adapters(engine)
        every = run(engine, chance, 12)
        check_memory(engine)
    for asked in every:
        check(asked, alone.generate([replace(asked.request, on_tokens=None)], asked.sampling)[0])
