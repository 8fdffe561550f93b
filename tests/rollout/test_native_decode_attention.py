"""Compiled attention of decode steps on a CPU: the numbers of its definition, in any company, and in the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.models.patches import choose_patches, sampling_patches
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine, attention
from strop.rollout.native.cpu.decode_attention import NAME, decode_attention, is_available
from tests.rollout import tiny
from tests.rollout.test_native import PROMPTS

pytestmark = pytest.mark.skipif(not is_available(), reason="no compiler, or a CPU without AVX-512")
CAPACITY = 150


@dataclass(frozen=True)
class Options:
    scale: float | None = None
    window: int | None = None


class Cache:
    """Keys and values of six rows; what no query may see is NaN."""

    def __init__(self, key_heads: int, size: int, positions: list[int], window: int | None = None) -> None:
        torch.manual_seed(size)
        self.keys = torch.full((6, key_heads, CAPACITY, size), torch.nan)
        self.values = torch.full((6, key_heads, CAPACITY, size), torch.nan)
        self.places = torch.randperm(6)[: len(positions)]
        self.positions = torch.tensor(positions)
        self.spans = [(max(0, end - (window or end + 1) + 1), end + 1) for end in positions]
        for place, (begin, end) in zip(self.places, self.spans):
            self.keys[place, :, begin:end] = 3 * torch.randn(key_heads, end - begin, size)
            self.values[place, :, begin:end] = torch.randn(key_heads, end - begin, size)

    def __call__(self, query: Tensor, options: Options) -> Tensor:
        return decode_attention(query, self.keys, self.values, self.places, self.positions, options)

    def largest_score(self, query: Tensor) -> float:
        """Before it is scaled."""
        scores = query @ self.keys[self.places].transpose(2, 3)
        return scores.nan_to_num(0).abs().max().item()

    def expected(self, query: Tensor, scale: float) -> Tensor:
        """By definition, in float64."""
        rows = []
        for one, place, (begin, end) in zip(query.double(), self.places, self.spans):
            keys = self.keys[place, :, begin:end].double()
            weights = (one @ keys.transpose(1, 2) * scale).softmax(-1)
            rows.append((weights @ self.values[place, :, begin:end].double()).flatten(0, 1))
        return torch.stack(rows)[:, None]


@pytest.mark.parametrize("heads", [1, 2, 7])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_the_numbers_are_those_of_the_definition(heads: int, size: int, window: int | None) -> None:
    cache = Cache(2, size, [0, 14, 15, 16, CAPACITY - 1], window)
    query = torch.randn(5, 2, heads, size)
    for scale in (None, 0.3):
        out = cache(query, Options(scale, window))
        expected = cache.expected(query, size**-0.5 if scale is None else scale)
        # A weight is as exact as its score, whose sum is rounded at its magnitude.
        atol = 1e-6 + 2**-23 * cache.largest_score(query) * (size**-0.5 if scale is None else scale)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


def test_scores_far_apart_and_far_from_zero() -> None:
    """The key of one position decides alone; scores of thousands do not overflow."""
    cache = Cache(1, 64, [99])
    query = torch.randn(1, 1, 2, 64)
    cache.keys[cache.places[0], 0, 41] = 1000 * query[0, 0, 0]
    cache.keys[cache.places[0], 0, 42] = 1000 * query[0, 0, 1]
    out = cache(query, Options())
    value = cache.values[cache.places[0], 0]
    torch.testing.assert_close(out[0, 0, 0], value[41], rtol=0, atol=0)
    torch.testing.assert_close(out[0, 0, 1], value[42], rtol=0, atol=0)


def test_a_row_has_the_same_bits_in_any_company_and_with_any_number_of_threads() -> None:
    cache = Cache(2, 64, [30, 100, 7, 149])
    query = torch.randn(4, 2, 3, 64)
    together = cache(query, Options())
    for row in range(4):
        at = slice(row, row + 1)
        alone = decode_attention(
            query[at], cache.keys, cache.values, cache.places[at], cache.positions[at], Options()
        )
        assert torch.equal(alone, together[at])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(cache(query, Options()), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_numbers_that_are_none_stay_in_their_row(broken: float) -> None:
    cache = Cache(2, 64, [30, 100])
    query = torch.randn(2, 2, 3, 64)
    query[1, 0] = broken
    out = cache(query, Options()).view(2, 2, 3, 64)
    assert out[1, 0].isnan().all()
    assert out[0].isfinite().all() and out[1, 1].isfinite().all()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Heads of 64; the list has the rows of each compiled call."""
    found: list[int] = []

    def watched(query: Tensor, *given: Any) -> Tensor:
        found.append(len(query))
        return decode_attention(query, *given)

    monkeypatch.setattr(attention, "decode_attention", watched)
    monkeypatch.setitem(tiny._HEAD, "head_dim", 64)
    return found


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_the_engine_samples_what_the_model_computes(calls: list[int], kind: str) -> None:
    """gemma3 has layers with a window of 5. Two greedy samples of a prompt stay equal: rows are shared."""
    model = tiny.make(kind)
    answers = NativeEngine(model).generate(
        [Request(prompt, n=2) for prompt in PROMPTS], Sampling(temperature=0, max_tokens=24)
    )
    assert set(calls) == {len(PROMPTS)}
    assert NAME in sampling_patches(model)
    for prompt, group in zip(PROMPTS, answers):
        expected = tiny.plain_greedy(model, prompt, 24)
        assert [one.ids for one in group] == [expected] * 2
        tiny.assert_log_probs(model, prompt, expected, group[0].log_probs)


def test_rows_that_differ_are_computed_apart(calls: list[int]) -> None:
    model = tiny.make("qwen3")
    group = NativeEngine(model).generate([Request(PROMPTS[1], n=4, seed=1)], Sampling(max_tokens=20))[0]
    assert 4 in calls
    for answer in group:
        tiny.assert_log_probs(model, PROMPTS[1], answer.ids, answer.log_probs)


def test_it_is_a_patch_that_can_be_left_out(calls: list[int]) -> None:
    model = tiny.make("qwen3")
    choose_patches(model, "off")
    NativeEngine(model).generate([Request(PROMPTS[1])], Sampling(max_tokens=8))
    assert not calls and NAME not in sampling_patches(model)


@pytest.mark.parametrize("kind", ["gemma2_softcap", "gpt_oss_sinks"])
def test_other_scores_are_left_to_torch(calls: list[int], kind: str) -> None:
    model = tiny.make(kind)
    NativeEngine(model).generate([Request(PROMPTS[1])], Sampling(temperature=0, max_tokens=8))
    assert not calls
