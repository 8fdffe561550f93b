"""The native engine returns the experts of exactly the tokens that it returns (router_replay.mode=R3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.base import (
    Completion,
    Request,
    Sampling,
)
from strop.rollout.continuation import continuation, join_completions
from strop.rollout.native import NativeEngine, pages, runner, scheduler, step_loop
from tests.backends.replay_checks import chosen, moved
from tests.models.tiny import tiny_model

LONG = [(7 * i * i + 3 * i) % 50 + 4 for i in range(40)]
PROMPTS = [[5, 9, 2], LONG, [*LONG[:25], 3, 3], LONG[:17], [7]]
REQUESTS = [Request(prompt, n=3, seed=i, max_tokens=6 + 5 * i) for i, prompt in enumerate(PROMPTS)]
GROWING = [Request([3 + i], seed=i, max_tokens=100) for i in range(4)]
SAMPLING = Sampling(temperature=0.7)
PER_TOKEN = 2 * 2 * 2 * 8 * 4 + 2 * 2
"""Bytes: keys and values of two layers in float32, and two experts of each."""


def assert_own(model: Any, requests: Sequence[Request], found: Sequence[Sequence[Completion]]) -> None:
    for request, completions in zip(requests, found, strict=True):
        for completion in completions:
            assert completion.experts is not None and completion.experts.dtype == np.uint8
            assert np.array_equal(completion.experts, chosen(model, [*request.ids, *completion.ids]))


WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "preempted": {"cache_bytes": 260 * PER_TOKEN},
    "drafts": {"speculation": SpeculationConfig(enable=True, num_tokens=3)},
    "no-prefixes": {"enable_prefix_caching": False},
    "decode-prefill": {"max_num_seqs": 4},
}


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("way", WAYS)
def test_experts_are_those_of_a_plain_pass(way: str, paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if paged:  # the cache of a GPU, read by plain torch
        monkeypatch.setattr(runner, "uses_pages", lambda device: True)
        for module in (pages, scheduler, step_loop):
            monkeypatch.setattr(module, "PAGE", 8)
        monkeypatch.setattr(step_loop, "HEADROOM", 8)
    if way == "decode-prefill":  # as on a GPU: few tokens after a cached prefix join decode steps
        monkeypatch.setattr(step_loop, "_MAX_DECODE_PREFILL", {"cpu": 64})
    own = scheduler.Scheduler._in_decode_steps
    joined: list[bool] = []

    def in_decode_steps(*arguments: Any) -> bool:
        joined.append(own(*arguments))
        return joined[-1]

    monkeypatch.setattr(scheduler.Scheduler, "_in_decode_steps", in_decode_steps)
    model = tiny_model("qwen3_moe")
    engine = NativeEngine(model, record_experts=True, **WAYS[way])
    requests = GROWING if way == "preempted" else REQUESTS
    found = engine.generate(requests, SAMPLING)
    stats = engine.stats()
    if way == "preempted":
        assert stats["preemptions"] > 0
    assert any(joined) == (way == "decode-prefill")
    if way == "drafts":
        assert stats["speculation/wasted"] > 0 and stats["speculation/accepted"] > 0
    assert_own(model, requests, found)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_other_families(family: str) -> None:
    model = tiny_model(family)
    engine = NativeEngine(model, record_experts=True)
    assert_own(model, REQUESTS[:3], engine.generate(REQUESTS[:3], SAMPLING))


def test_tokens_keep_the_experts_with_which_they_were_sampled() -> None:
    """A completion that is continued under other weights: its first tokens have the experts of the first
    weights, the next ones those of the second."""
    model = tiny_model("qwen3_moe")
    engine = NativeEngine(model, record_experts=True)
    request = Request(PROMPTS[0], seed=3, max_tokens=30)
    states = engine.submit(request, SAMPLING)
    with engine.borrowed_model():
        for _ in range(10):
            engine.step()
    engine.update_weights(moved(tiny_model("qwen3_moe"), 1).named_parameters(), 1)
    with engine.borrowed_model():
        while not states.done:
            engine.step()
    [whole] = states.result()
    assert [version for version, _ in whole.versions] == [0, 1]
    split = len(request.ids) + whole.versions[0][1] - 1
    assert whole.experts is not None
    ids = [*request.ids, *whole.ids]
    assert np.array_equal(whole.experts[split:], chosen(model, ids)[split:])
    before = chosen(tiny_model("qwen3_moe"), ids)
    assert np.array_equal(whole.experts[:split], before[:split])
    assert not np.array_equal(whole.experts[split:], before[split:]), "the weights choose other experts"


def test_parts_of_a_completion_are_joined() -> None:
    model = tiny_model("qwen3_moe")
    engine = NativeEngine(model, record_experts=True)
    request = Request(LONG, seed=1, max_tokens=5)
    [[first]] = engine.generate([request], SAMPLING)
    [[rest]] = engine.generate([continuation(request, 0, first, 12)], SAMPLING)
    assert_own(model, [request], [[join_completions(first, rest)]])


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no router of experts"):
        NativeEngine(tiny_model("llama"), record_experts=True).generate(REQUESTS[:1], SAMPLING)
