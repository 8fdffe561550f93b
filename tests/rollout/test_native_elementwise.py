"""Compiled norms, gates and draws on a CPU: the numbers of their definitions, in any company, and in the
engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from strop.models.lora import adapted_layers, add_adapters
from strop.models.patches import choose_patches, sampling_patches
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine, sampler
from strop.rollout.native.cpu import draw, elementwise
from strop.rollout.native.sampler import SamplingTensors, sample
from tests.rollout import tiny
from tests.rollout.test_native import PROMPTS

pytestmark = pytest.mark.skipif(
    not elementwise.is_available(), reason="no compiler, or a CPU without AVX-512"
)
NAMES = ["rms_norm_cpu", "gated_mlp_cpu", "rotary_cpu"]
VOCABULARY = 8200
"""Large enough for the compiled draw, and no multiple of its blocks."""


# --- norms and gates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 15, 63, 64, 65, 896, 1000])
def test_norms_are_those_of_the_definition(size: int) -> None:
    torch.manual_seed(size)
    hidden = torch.randn(3, 2, size) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None]
    weight = torch.randn(size)
    found = elementwise.rms_norm(hidden, weight, 1e-6)
    wide = hidden.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(elementwise.rms_norm(hidden[1:2, 1:], weight, 1e-6), found[1:2, 1:])


def test_gates_are_those_of_the_definition() -> None:
    scores = torch.cat(
        [torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38])]
    )
    up = torch.randn(len(scores), generator=torch.Generator().manual_seed(0))
    found = elementwise.gated_silu(scores, up)
    expected = F.silu(scores.double()) * up.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-30)
    broken = elementwise.gated_silu(torch.tensor([math.nan, math.inf, 1.0]), torch.ones(3))
    assert broken[0].isnan() and broken[1] == math.inf and broken[2].isfinite()


@pytest.mark.parametrize("size", [2, 6, 64, 128])
@pytest.mark.parametrize("one_position", [False, True])
def test_rotations_are_those_of_the_definition(size: int, one_position: bool) -> None:
    """Also of queries that are a view with heads and positions exchanged, as models make them."""
    torch.manual_seed(size)
    states = torch.randn(3, 5, 4, size).transpose(1, 2)
    cos, sin = torch.randn(2, 1 if one_position else 3, 5, size)
    found = elementwise.rotary(states, cos, sin)
    assert found.stride() == states.stride()
    half = torch.cat([-states[..., size // 2 :], states[..., : size // 2]], -1)
    expected = states.double() * cos[:, None].double() + half.double() * sin[:, None].double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(elementwise.rotary(states.contiguous(), cos, sin), found)


# --- draws --------------------------------------------------------------------------------------------------


def by_torch(monkeypatch: pytest.MonkeyPatch, *given: Any) -> sampler.SampledTokens:
    with monkeypatch.context() as patched:
        patched.setattr(draw, "takes", lambda logits: False)
        return sample(*given)


@settings(max_examples=40, deadline=None)
@given(st.integers(8192, 9000), st.integers(0, 1000), st.floats(0, 1, exclude_max=True), st.floats(0.1, 3))
def test_the_token_is_where_the_cumulative_weight_passes_the_number(
    size: int, seed: int, number: float, temperature: float
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(1, size) * 3
    logits[0, torch.rand(size) < 0.3] = -torch.inf
    logits[0, seed % size] = 1.0
    assert draw.takes(logits)
    found = sample(
        logits, torch.tensor([number], dtype=torch.float64), SamplingTensors(torch.tensor([temperature]))
    )
    probs = torch.softmax(logits[0].double() / torch.tensor(temperature).double(), -1)
    bounds = probs.cumsum(0)
    token = int(found.tokens)
    assert probs[token] > 0 and bool(found.valid)
    assert float(bounds[token] - probs[token]) - 1e-5 <= number <= float(bounds[token]) + 1e-5
    assert float(found.log_probs) == pytest.approx(float(probs[token].log()), rel=1e-6, abs=1e-5)


def test_draws_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows, with the first of equal logits, beside others."""
    torch.manual_seed(0)
    logits = torch.randn(64, VOCABULARY) * 3
    logits[::3, [77, 5000]] = 30.0
    greedy = torch.arange(64) % 3 == 0
    given = (
        logits,
        torch.rand(64, dtype=torch.float64),
        SamplingTensors(torch.where(greedy, 1.0, 0.8), greedy=greedy),
    )
    found = sample(*given)
    expected = by_torch(monkeypatch, *given)
    assert torch.equal(found.tokens, expected.tokens) and set(found.tokens[::3].tolist()) == {77}
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=4e-6)
    all_greedy = sample(logits, given[1], SamplingTensors(all_greedy=True))
    assert torch.equal(all_greedy.tokens, logits.argmax(-1))


def test_a_row_is_drawn_alike_in_any_company_and_with_any_number_of_threads() -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, VOCABULARY + 3)[:, :VOCABULARY]  # rows of a larger matrix
    numbers = torch.rand(7, dtype=torch.float64)
    together = sample(logits, numbers, SamplingTensors())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for row in range(7):
            at = slice(row, row + 1)
            alone = sample(logits[at], numbers[at], SamplingTensors())
            assert torch.equal(alone.tokens, together.tokens[at])
            assert torch.equal(alone.log_probs, together.log_probs[at])
    finally:
        torch.set_num_threads(before)


def test_numbers_at_the_edges_choose_tokens_that_have_weight() -> None:
    logits = torch.full((3, VOCABULARY), -torch.inf)
    logits[:, 700:1300] = torch.randn(3, 600)
    numbers = torch.tensor([0.0, 1 - 2.0**-48, 1.0], dtype=torch.float64)
    assert sample(logits, numbers, SamplingTensors()).tokens.tolist() == [700, 1299, 1299]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_make_their_row_invalid(broken: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, VOCABULARY)
    logits[0, 5000] = broken
    logits[1] = -math.inf
    found = sample(logits, torch.full((4,), 0.5, dtype=torch.float64), SamplingTensors())
    assert found.valid.tolist() == [False, False, True, True]
    assert found.tokens[:2].tolist() == [0, 0] and found.log_probs[2:].isfinite().all()


@pytest.mark.parametrize("setting", ["top_k", "top_p", "min_p"])
def test_filters_are_left_to_torch(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> None:
        raise AssertionError("drawn without the filter")

    monkeypatch.setattr(draw, "draw", refused)
    value = torch.tensor([2]) if setting == "top_k" else torch.tensor([0.3])
    logits = torch.randn(1, VOCABULARY)
    more = {"max_top_k": 2} if setting == "top_k" else {}
    kept = SamplingTensors(**{setting: value}, **more)
    assert sample(logits, torch.tensor([0.1], dtype=torch.float64), kept).valid


# --- in the engine ------------------------------------------------------------------------------------------


def model_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(elementwise, "_LARGE", 1)
    return tiny.make(kind)


def watch(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts calls of the compiled functions."""
    calls = {"rms_norm": 0, "gated_silu": 0, "rotary": 0}
    for name in calls:
        real = getattr(elementwise, name)

        def counted(*given: Any, name: str = name, real: Any = real) -> Tensor:
            calls[name] += 1
            out: Tensor = real(*given)
            return out

        monkeypatch.setattr(elementwise, name, counted)
    return calls


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "smollm"])
def test_the_engine_samples_what_the_model_computes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind, monkeypatch)
    calls = watch(monkeypatch)
    answers = NativeEngine(model).generate(
        [Request(prompt) for prompt in PROMPTS], Sampling(temperature=0, max_tokens=12)
    )
    assert min(calls.values()) > 0
    assert set(NAMES) <= set(sampling_patches(model))
    before = dict(calls)
    for prompt, [answer] in zip(PROMPTS, answers):
        assert answer.ids == tiny.plain_greedy(model, prompt, 12)
        tiny.assert_log_probs(model, prompt, answer.ids, answer.log_probs)
    assert calls == before, "the trainer's own passes are not changed"


@pytest.mark.parametrize("kind", ["gemma3", "phi"])
def test_other_formulas_stay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gemma adds 1 to the weights of its norms and gates with gelu; phi has layer norms and no gate, and
    rotates a part of a head, which it cuts off before."""
    model = model_of(kind, monkeypatch)
    calls = watch(monkeypatch)
    answers = NativeEngine(model).generate([Request(PROMPTS[1])], Sampling(temperature=0, max_tokens=8))
    assert set(NAMES) & set(sampling_patches(model)) == {"rotary_cpu"}
    assert answers[0][0].ids == tiny.plain_greedy(model, PROMPTS[1], 8)
    assert calls["rms_norm"] <= 2 and calls["gated_silu"] <= 1  # self-checks alone


def test_adapters_of_the_gate_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = add_adapters(model_of("qwen2", monkeypatch), rank=4, alpha=8)
    for layer in adapted_layers(model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    answer = NativeEngine(model).generate([Request(PROMPTS[1])], Sampling(temperature=0, max_tokens=8))[0][0]
    assert "gated_mlp_cpu" in sampling_patches(model)
    assert answer.ids == tiny.plain_greedy(model, PROMPTS[1], 8)
    tiny.assert_log_probs(model, PROMPTS[1], answer.ids, answer.log_probs)


def test_they_are_patches_that_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen2", monkeypatch)
    choose_patches(model, ["gated_mlp_cpu"])
    NativeEngine(model).generate([Request(PROMPTS[1])], Sampling(max_tokens=4))
    assert "gated_mlp_cpu" in sampling_patches(model) and "rms_norm_cpu" not in sampling_patches(model)


def test_models_of_one_family_share_the_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine stops first; passes with a gradient keep the plain function meanwhile."""
    plain = modeling_qwen2.apply_rotary_pos_emb
    first = NativeEngine(model_of("qwen2", monkeypatch))
    second = NativeEngine(model_of("qwen2", monkeypatch))
    calls = watch(monkeypatch)
    with first.borrowed_model():
        with second.borrowed_model():
            pass
        shared = modeling_qwen2.apply_rotary_pos_emb
        assert shared is not plain
        q = torch.randn(1, 2, 3, 8, requires_grad=True)
        cos = torch.randn(1, 3, 8)
        before = calls["rotary"]
        assert shared(q, q, cos, cos)[0].requires_grad and calls["rotary"] == before
    assert modeling_qwen2.apply_rotary_pos_emb is plain


def test_small_models_are_not_worth_a_compiler() -> None:
    model = tiny.make("qwen2")
    NativeEngine(model).generate([Request(PROMPTS[1])], Sampling(max_tokens=4))
    assert not set(NAMES) & set(sampling_patches(model))
