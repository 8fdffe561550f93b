"""Speculative decoding in the native engine: the tokens and log-probs of decoding one by one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.base import (
    Completion,
    Request,
    Sampling,
)
from strop.rollout.continuation import continuation, join_completions
from strop.rollout.native import NativeEngine
from tests.rollout import tiny
from tests.rollout.test_native_adapters import weights_of

PROMPTS = [[5, 9, 2], [7, 1, 1, 4, 30, 12, 8, 77, 3, 2, 6], [11], list(range(1, 40)), [3, 4, 5, 6, 7, 8]]
REQUESTS = [Request(p, n=2, seed=i, max_tokens=8 + 4 * i) for i, p in enumerate(PROMPTS)]
WAYS = {
    "greedy": Sampling(temperature=0),
    "plain": Sampling(),
    "filters": Sampling(temperature=0.5, top_k=8, top_p=0.9, min_p=0.05),
    "penalty": Sampling(repetition_penalty=1.3, top_k=12),
    "stops": Sampling(temperature=0.3, stop_ids=tuple(range(20))),
}


def speculating(model: Any, num_tokens: int = 3, **settings: Any) -> NativeEngine:
    return NativeEngine(model, speculation=SpeculationConfig(enable=True, num_tokens=num_tokens), **settings)


def assert_same(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for group, wanted in zip(found, expected, strict=True):
        assert [c.ids for c in group] == [c.ids for c in wanted]
        assert [c.finish for c in group] == [c.finish for c in wanted]
        for one, other in zip(group, wanted):
            torch.testing.assert_close(
                torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=1e-6
            )


@pytest.mark.parametrize("way, num_tokens", [*((way, 4) for way in WAYS), ("plain", 1)])
def test_tokens_and_log_probs_are_those_without(way: str, num_tokens: int) -> None:
    model = tiny.make()
    expected = NativeEngine(model).generate(REQUESTS, WAYS[way])
    engine = speculating(model, num_tokens)
    assert_same(engine.generate(REQUESTS, WAYS[way]), expected)
    first = engine.stats()
    assert_same(engine.generate(REQUESTS, WAYS[way]), expected)
    second = engine.stats()
    assert first["speculation/share_of_steps"] == second["speculation/share_of_steps"] == 1
    assert second["speculation/acceptance"] > 0.7
    assert second["speculation/wasted"] == second["speculation/drafted"] - second["speculation/accepted"]
    plain_steps = max(len(c.ids) for group in expected for c in group) - 1
    assert sum(value for name, value in second.items() if name.startswith("steps_")) < 0.8 * plain_steps


@pytest.mark.parametrize("kind", ["mistral_window", "gpt_oss_sinks"])
def test_other_models(kind: str) -> None:
    model = tiny.make(kind)
    expected = NativeEngine(model).generate(REQUESTS, Sampling(temperature=0.7))
    engine = speculating(model)
    for _ in range(2):
        assert_same(engine.generate(REQUESTS, Sampling(temperature=0.7)), expected)


def test_random_answers_are_hardly_guessed_and_repeated_ones_are() -> None:
    engine = speculating(tiny.fixed(torch.zeros(tiny.VOCABULARY)))
    request = [Request([5, 9, 2], n=4, seed=1)]
    engine.generate(request, Sampling(max_tokens=40))
    assert engine.stats()["speculation/acceptance"] < 0.1
    constant = torch.zeros(tiny.VOCABULARY)
    constant[7] = 50.0
    engine = speculating(tiny.fixed(constant))
    engine.generate(request, Sampling(max_tokens=40))
    assert engine.stats()["speculation/acceptance"] > 0.95


@pytest.mark.parametrize("limits", [{"max_num_seqs": 3}, {"cache_bytes": 80 * 256}], ids=str)
def test_queues_and_preemption(limits: dict[str, int]) -> None:
    model = tiny.make()
    engine = speculating(model, **limits)
    for _ in range(2):
        expected = NativeEngine(model).generate(REQUESTS, Sampling(temperature=0.5))
        assert_same(engine.generate(REQUESTS, Sampling(temperature=0.5)), expected)


def test_with_more_rows_than_max_rows_it_waits_for_the_tail() -> None:
    model = tiny.make()
    engine = NativeEngine(model, speculation=SpeculationConfig(enable=True, num_tokens=3, max_rows=4))
    assert_same(engine.generate(REQUESTS, Sampling()), NativeEngine(model).generate(REQUESTS, Sampling()))
    assert 0 < engine.stats()["speculation/share_of_steps"] < 1


def test_the_distribution_is_the_models() -> None:
    """Three tokens with known probabilities, many seeds: drafts from earlier answers must not shift them."""
    probabilities = torch.tensor([0.5, 0.3, 0.2])
    logits = torch.full((tiny.VOCABULARY,), -40.0)
    logits[3:6] = probabilities.log()
    engine = speculating(tiny.fixed(logits), 3, max_num_seqs=64)
    answers = engine.generate([Request([3], n=64, seed=s) for s in range(2)], Sampling(max_tokens=24))
    assert engine.stats()["speculation/accepted"] > 500
    tokens = torch.tensor([c.ids for group in answers for c in group])
    counts = torch.bincount(tokens.flatten(), minlength=6)[3:6].double()
    expected = counts.sum() * probabilities.double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 13.8  # 0.1% of 2 degrees of freedom
    pairs = torch.bincount((tokens[:, :-1] * 10 + tokens[:, 1:]).flatten(), minlength=60).double()
    pair_counts = torch.stack([pairs[10 * a + b] for a in (3, 4, 5) for b in (3, 4, 5)])
    pair_expected = (probabilities[:, None] * probabilities).flatten().double() * pair_counts.sum()
    assert float(((pair_counts - pair_expected) ** 2 / pair_expected).sum()) < 26.1  # 8 degrees


def test_an_aborted_answer_is_continued_as_if_it_never_stopped() -> None:
    model = tiny.make()
    request = Request(PROMPTS[1], seed=4)
    whole = NativeEngine(model).generate([request], Sampling(max_tokens=40))[0][0]
    engine = speculating(model)
    engine.generate([request], Sampling(max_tokens=40))
    engine.stats()
    state = engine.submit(request, Sampling(max_tokens=40))
    with engine.borrowed_model():
        for _ in range(4):
            engine.step()
    engine.abort()
    engine.step()
    part = state.result()[0]
    assert part.finish == "abort" and 4 < len(part.ids) < 40
    rest = engine.generate([continuation(request, 0, part, 40)], Sampling())[0][0]
    joined = join_completions(part, rest)
    assert joined.ids == whole.ids
    assert engine.stats()["speculation/acceptance"] > 0.8


def test_new_weights_during_sampling() -> None:
    """The memory of answers under older weights changes the speed only."""
    model = tiny.make()
    engine = speculating(model)
    engine.generate(REQUESTS, Sampling())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    engine.update_weights((), 1)
    assert_same(engine.generate(REQUESTS, Sampling()), NativeEngine(model).generate(REQUESTS, Sampling()))


def test_streams_agents_and_adapters() -> None:
    model = tiny.make("qwen2")
    heard: list[int] = []

    def ask(engine: NativeEngine) -> list[list[Completion]]:
        engine.load_adapter("one", weights_of(model, 2, 1), 1.0)
        engine.load_adapter("two", weights_of(model, 3, 2), 0.5)
        requests = [
            Request(PROMPTS[1], seed=1, adapter="one"),
            Request(PROMPTS[1], seed=1, adapter="two"),
            Request(PROMPTS[1], seed=1, on_tokens=lambda _, ids, __: heard.extend(ids)),
        ]

        async def all_of_them() -> list[list[Completion]]:
            return list(
                await asyncio.gather(*(engine.agenerate(r, Sampling(max_tokens=20)) for r in requests))
            )

        return asyncio.run(all_of_them())

    engine = speculating(model)
    expected = ask(NativeEngine(model))
    for _ in range(2):
        heard.clear()
        assert_same(ask(engine), expected)
        assert heard == expected[2][0].ids
    assert engine.stats()["speculation/accepted"] > 0
    engine.close()


def test_on_a_cpu_auto_is_off() -> None:
    engine = NativeEngine(tiny.make())
    engine.generate(REQUESTS, Sampling())
    engine.generate(REQUESTS, Sampling())
    assert engine.stats()["speculation/drafted"] == 0
