"""Draws by one uniform number per row."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rollout.base import Sampling
from strop.rollout.native import sampler
from strop.rollout.native.sampler import ALL, SamplingTensors, apply_penalty, sample, stream, uniforms
from tests.rollout.test_conformance import allowed


def test_uniforms_are_uniform_and_depend_on_stream_and_position() -> None:
    streams = torch.tensor([stream(seed, i) for seed in range(40) for i in range(50)])
    numbers = torch.stack([uniforms(streams, torch.full_like(streams, at)) for at in range(20)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers.float(), bins=50, min=0, max=1)
    due = numbers.numel() / 50
    assert float(((counts - due) ** 2 / due).sum()) < 49 + 5 * (2 * 49) ** 0.5
    assert numbers.unique().numel() == numbers.numel()
    together = torch.corrcoef(torch.stack([numbers[:-1].flatten(), numbers[1:].flatten()]))[0, 1]
    assert abs(float(together)) < 0.03
    assert stream(1, 0) != stream(0, 1) and -(1 << 63) <= stream(-5, 3) < 1 << 63


def test_uniforms_are_those_of_splitmix64() -> None:
    """The kernels compute them too: a change here would be a difference between devices."""
    bits = (1 << 64) - 1

    def splitmix64(counter: int) -> int:
        z = counter & bits
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
        return z ^ (z >> 31)

    step = 0x9E3779B97F4A7C15
    for seed, number, position in itertools.product((-5, 0, 1, 1 << 40), (0, 7), (0, 1, 100_000)):
        chosen = splitmix64(splitmix64(seed + step) + (number + 1) * step)
        assert stream(seed, number) & bits == chosen
        found = uniforms(torch.tensor([stream(seed, number)]), torch.tensor([position]))
        assert float(found) == (splitmix64(chosen + (position + 1) * step) >> 16) / 2**48


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 1500), st.integers(0, 1000), st.floats(0, 1, exclude_max=True))
def test_the_token_is_where_the_cumulative_weight_passes_the_number(
    size: int, seed: int, number: float
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(1, size) * 3
    logits[0, torch.rand(size) < 0.3] = -torch.inf
    logits[0, seed % size] = 1.0
    draw = sample(logits, torch.tensor([number], dtype=torch.float64), SamplingTensors())
    probs = torch.softmax(logits[0].double(), -1)
    bounds = probs.cumsum(0)
    token = int(draw.tokens)
    assert probs[token] > 0 and bool(draw.valid)
    assert float(bounds[token] - probs[token]) - 1e-5 <= number <= float(bounds[token]) + 1e-5
    assert float(draw.log_probs) == pytest.approx(float(probs[token].log()), abs=1e-5)


def test_numbers_at_the_edges_choose_tokens_that_have_weight() -> None:
    logits = torch.full((2, 2000), -torch.inf)
    logits[:, 700:1300] = torch.randn(2, 600)
    draw = sample(logits, torch.tensor([0.0, 1 - 2.0**-48], dtype=torch.float64), SamplingTensors())
    assert draw.tokens.tolist() == [700, 1299]


def test_settings_of_a_row_do_not_touch_the_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 5000).expand(5, -1).contiguous()
    numbers = torch.full((5,), 0.987, dtype=torch.float64)
    mixed = SamplingTensors(
        temperature=torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0]),
        greedy=torch.tensor([True, False, False, False, False]),
        top_k=torch.tensor([ALL, ALL, ALL, 3, ALL]),
        max_top_k=ALL,
        top_p=torch.tensor([1.0, 0.2, 1.0, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.9]),
    )
    found = sample(logits, numbers, mixed).tokens.tolist()

    def expected(kept: torch.Tensor, temperature: float = 1.0) -> int:
        weights = torch.softmax(logits[0].double() / temperature, -1).where(kept, 0)
        return int((weights.cumsum(0) <= 0.987 * weights.sum()).sum())

    probs = torch.softmax(logits[0].double(), -1)
    ranked, order = probs.sort(descending=True)
    nucleus = torch.zeros(5000, dtype=torch.bool).scatter(0, order, ranked.cumsum(0) - ranked < 0.2)
    everything = torch.ones(5000, dtype=torch.bool)
    assert found[0] == int(order[0])
    assert found[1:] == [
        expected(nucleus),
        expected(everything, 0.5),
        expected(probs >= ranked[2]),
        expected(probs >= 0.9 * ranked[0]),
    ]


def test_a_top_p_of_many_tokens_of_a_top_k_is_the_same_in_any_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 2000) * 2
    alone = SamplingTensors(top_k=torch.tensor([300]), max_top_k=300, top_p=torch.tensor([0.6]))
    mixed = SamplingTensors(top_k=torch.tensor([300, ALL]), max_top_k=ALL, top_p=torch.tensor([0.6, 1.0]))
    found = sampler.probabilities(logits, mixed)[:1]
    assert torch.equal(found > 0, sampler.probabilities(logits[:1], alone) > 0)


def test_a_nucleus_wider_than_the_candidates_is_still_exact() -> None:
    flat = torch.zeros(1, 4000)
    seen = {
        int(
            sample(
                flat,
                torch.tensor([u / 500], dtype=torch.float64),
                SamplingTensors(top_p=torch.tensor([0.95])),
            ).tokens
        )
        for u in range(500)
    }
    assert len(seen) == 500


def test_rows_that_are_not_numbers_are_marked() -> None:
    logits = torch.zeros(4, 10)
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    draw = sample(logits, torch.full((4,), 0.5, dtype=torch.float64), SamplingTensors())
    assert draw.valid.tolist() == [True, False, False, False]


def test_a_penalty_counts_a_token_once() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0], [2.0, -2.0, 1.0]])
    found = apply_penalty(logits, torch.tensor([[0, 0, 1], [2, 2, 2]]), torch.tensor([2.0, 4.0]))
    assert found.tolist() == [[1.0, -4.0, 1.0], [2.0, -2.0, 0.25]]
    short = apply_penalty(logits.bfloat16(), torch.tensor([[0], [2]]), torch.tensor([1.1, 1.1]))
    assert short.dtype == torch.float32 and short[0, 0] == torch.tensor(2.0) / 1.1, "not rounded again"


def test_penalised_logits_are_sampled_from_and_the_log_probs_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 40)
    penalised = apply_penalty(logits, torch.arange(10, 30)[None], torch.tensor([3.0]))
    warm = SamplingTensors(temperature=torch.tensor([0.7]))
    wanted = (penalised / 0.7).softmax(-1)
    torch.testing.assert_close(sampler.probabilities(logits, warm, penalised), wanted)
    number = torch.tensor([0.3], dtype=torch.float64)
    found = sample(logits, number, warm, penalised)
    assert int(found.tokens) == int((wanted.cumsum(-1) <= 0.3).sum())
    assert float(found.log_probs) == pytest.approx(float((logits / 0.7).log_softmax(-1)[0, found.tokens]))
    best = sample(logits, number, SamplingTensors(all_greedy=True), penalised)
    assert int(best.tokens) == int(penalised.argmax()) != int(logits.argmax())


_WAYS = list(itertools.product([0.6, 1.0, 1.7], [0, 7], [1.0, 0.8], [0.0, 0.08]))


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), _WAYS)
@pytest.mark.parametrize("size", [60, 700], ids=["one block", "several blocks"])
def test_every_combination_of_settings_draws_from_its_own_distribution(
    size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Chi-square against the definition; the bound is the mean of the statistic and five standard deviations."""
    rows, rounds = 2000, 4
    draws = rows * rounds
    logits = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 2
    expected = (
        allowed(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)) * draws
    )

    def column(value: float) -> torch.Tensor:
        return torch.full((rows,), value)

    knobs = SamplingTensors(
        temperature=column(temperature),
        top_k=column(top_k).long() if top_k else None,
        max_top_k=top_k,
        top_p=column(top_p) if top_p < 1 else None,
        min_p=column(min_p) if min_p else None,
    )
    streams = torch.tensor([stream(i, 0) for i in range(rows)])
    numbers = torch.cat([uniforms(streams, torch.full((rows,), place)) for place in range(rounds)])
    drawn = torch.cat([sample(logits.expand(rows, -1), part, knobs).tokens for part in numbers.split(rows)])
    seen = torch.bincount(drawn, minlength=size).double()
    assert seen[expected == 0].sum() == 0
    often = expected >= 5
    chi = float(((seen - expected) ** 2 / expected)[often].sum())
    freedom = int(often.sum()) - 1
    rest = float(expected[~often].sum())
    if rest >= 5:
        chi, freedom = chi + float(seen[~often].sum() - rest) ** 2 / rest, freedom + 1
    assert chi < freedom + 5 * (2 * max(1, freedom)) ** 0.5, (chi, freedom)


def test_rows_in_parts_are_sampled_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    rows, size = 11, 1300
    logits = torch.randn(rows, size) * 3
    uniform = torch.rand(rows, dtype=torch.float64)
    given = SamplingTensors(
        temperature=torch.rand(rows) + 0.5,
        greedy=torch.arange(rows) % 4 == 0,
        top_k=torch.where(torch.arange(rows) % 3 == 0, 7, ALL),
        max_top_k=ALL,
        top_p=torch.linspace(0.5, 1, rows),
        min_p=torch.linspace(0, 0.1, rows),
    )
    penalised = logits * 0.9
    whole = sample(logits, uniform, given, penalised)
    for at_a_time in (1, 4):
        monkeypatch.setattr(sampler, "_HOST_NUMBERS", at_a_time * size)
        parts = sample(logits, uniform, given, penalised)
        assert torch.equal(parts.tokens, whole.tokens) and torch.equal(parts.valid, whole.valid)
        torch.testing.assert_close(parts.log_probs, whole.log_probs, rtol=0, atol=1e-6)
