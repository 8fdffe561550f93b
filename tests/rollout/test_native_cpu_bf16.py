"""Compiled functions of the CPU engine in bf16: the numbers of their definitions, rounded where torch rounds,
in any company, and in the engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from strop.cpu import packed_attention
from strop.models.lora import adapted_layers
from strop.models.patches import sampling_patches
from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native import NativeEngine, attention
from strop.rollout.native.cpu import decode_attention, draw, elementwise, few_rows_bf16
from strop.rollout.native.cpu import packed_linear as packed
from strop.rollout.native.cpu.few_rows_bf16 import PackedBf16Weight, packed_bf16_weight
from strop.rollout.native.sampler import SamplingTensors, sample
from tests.rollout import tiny
from tests.rollout.test_native import PROMPTS
from tests.rollout.test_native_decode_attention import Cache, Options
from tests.rollout.test_native_elementwise import by_torch, watch

BF16 = torch.bfloat16
compiles = pytest.mark.skipif(
    not elementwise.is_available(BF16), reason="no compiler, or a CPU without AVX-512"
)


def random(*shape: int) -> Tensor:
    return torch.randn(shape).to(BF16)


def assert_rounded(found: Tensor, expected: Tensor, atol: float = 0) -> None:
    """`found` is the nearest number in bf16; or its neighbour, for a few numbers halfway between two. `atol`:
    for sums in float32 that nearly cancel."""
    assert found.dtype == BF16
    nearest = expected.to(BF16)
    other = (found != nearest) & ~(found.isnan() & nearest.isnan())
    assert other.sum() <= max(1, found.numel() // 500)
    torch.testing.assert_close(found.double(), nearest.double(), rtol=2**-7, atol=atol, equal_nan=True)


# --- norms, gates, rotations, draws, attention --------------------------------------------------------------


@compiles
@pytest.mark.parametrize("size", [1, 15, 16, 63, 64, 65, 896, 1000])
def test_norms_round_where_the_module_does(size: int) -> None:
    torch.manual_seed(size)
    hidden = random(3, 2, size) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None].to(BF16)
    weight = random(size)
    wide = hidden.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    found = elementwise.rms_norm(hidden, weight, 1e-6)
    assert_rounded(found, normed.to(BF16).double() * weight.double())
    assert torch.equal(elementwise.rms_norm(hidden[1:2, 1:], weight, 1e-6), found[1:2, 1:])


@compiles
def test_gates_round_where_the_module_does() -> None:
    """All numbers in bf16. Below e^-87 an exponential counts as 0."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    every = every[every.isfinite()]
    up = torch.randn(len(every), generator=torch.Generator().manual_seed(0)).to(BF16)
    normal = F.silu(every.double()).abs() > 2**-118
    found = elementwise.gated_silu(every, up)
    assert_rounded(found[normal], F.silu(every.double()).to(BF16).double()[normal] * up.double()[normal])
    assert found[~normal].abs().max() < 2**-115
    broken = elementwise.gated_silu(torch.tensor([math.nan, math.inf, 1.0]).to(BF16), torch.ones(3).to(BF16))
    assert broken[0].isnan() and broken[1] == math.inf and broken[2].isfinite()


@compiles
@pytest.mark.parametrize("size", [2, 6, 64, 80, 128])
@pytest.mark.parametrize("one_position", [False, True])
def test_rotations_have_the_bits_of_torch(size: int, one_position: bool) -> None:
    torch.manual_seed(size)
    states = random(3, 5, 4, size).transpose(1, 2)
    cos, sin = random(2, 1 if one_position else 3, 5, size)
    half = torch.cat([-states[..., size // 2 :], states[..., : size // 2]], -1)
    expected = states * cos[:, None] + half * sin[:, None]
    assert torch.equal(elementwise.rotary(states, cos, sin), expected)


@compiles
def test_draws_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = random(64, 8203)[:, :8200] * 3
    logits[::3, [77, 5000]] = 30.0
    logits[1, 6] = torch.nan
    logits[2, 100:] = -torch.inf
    greedy = torch.arange(64) % 3 == 0
    settings = SamplingTensors(torch.where(greedy, 1.0, 0.8), greedy=greedy)
    given = (logits, torch.rand(64, dtype=torch.float64), settings)
    assert draw.takes(logits)
    found = sample(*given)
    expected = by_torch(monkeypatch, *given)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.valid, expected.valid)
    right = found.valid
    torch.testing.assert_close(found.log_probs[right], expected.log_probs[right], rtol=0, atol=4e-6)


@compiles
@pytest.mark.parametrize("heads", [1, 7])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_attention_is_that_of_the_definition(heads: int, size: int, window: int | None) -> None:
    """Scores and weights are not rounded: only the result is."""
    cache = Cache(2, size, [0, 14, 15, 16, 149], window)
    cache.keys = cache.keys.to(BF16)
    cache.values = cache.values.to(BF16)
    query = random(5, 2, heads, size)
    out = cache(query, Options(None, window))
    assert_rounded(out, cache.expected(query, size**-0.5), atol=2e-6)


# --- products -----------------------------------------------------------------------------------------------


@pytest.fixture
def weight() -> Tensor:
    if packed_bf16_weight(torch.zeros(1, 1, dtype=BF16)) is None:
        pytest.skip("no compiler, or a CPU without AMX")
    torch.manual_seed(0)
    return (torch.randn(75, 301) / 301**0.5).to(BF16)


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64, 65, few_rows_bf16.MOST_ROWS])
@pytest.mark.parametrize("rank", [0, 1, 32, 40])
def test_products_are_those_of_float64_rounded_once(weight: Tensor, rows: int, rank: int) -> None:
    x = random(rows, 301)
    bias = random(75)
    multiply = packed_bf16_weight(weight)
    assert multiply is not None and multiply.takes(x, rank)
    expected = F.linear(x.double(), weight.double(), bias.double())
    adapter = None
    if rank:
        a, b = (torch.randn(rank, 301) / 301**0.5).to(BF16), (torch.randn(75, rank) / rank**0.5).to(BF16)
        adapter = multiply.adapter(a, b, 0.5)
        low = (0.5 * (x.double() @ a.double().t())).to(BF16)
        expected += low.double() @ b.double().t()
    found = multiply(x[None], bias, adapter)[0]
    # float32 sums of numbers that nearly cancel
    near = (found.double() - expected).abs() <= 2**-8 * expected.abs() + 4e-3 * (rank > 0) + 1e-5
    assert near.all()
    assert torch.equal(multiply(x, None), multiply(x, torch.zeros(75, dtype=BF16)))


def test_a_row_has_the_same_bits_with_any_other_rows_and_threads(weight: Tensor) -> None:
    multiply = packed_bf16_weight(weight)
    assert multiply is not None
    x = random(150, 301)
    adapter = multiply.adapter(random(6, 301), random(75, 6), 0.5)
    whole = multiply(x, None, adapter)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(multiply(x, None, adapter), whole)
    finally:
        torch.set_num_threads(before)
    for rows in (1, 16, 31, 40, 64, 100):
        assert torch.equal(multiply(x[-rows:], None, adapter), whole[-rows:])


def test_products_of_torch_that_use_the_tiles_too_stay_right(weight: Tensor) -> None:
    multiply = packed_bf16_weight(weight)
    assert multiply is not None
    x, square = random(48, 301), random(256, 256)
    alone = square @ square
    for _ in range(3):
        multiply(x, None)
        assert torch.equal(square @ square, alone)


def test_an_adapter_that_is_trained_is_read_again(weight: Tensor) -> None:
    multiply = packed_bf16_weight(weight)
    assert multiply is not None
    a, b, x = random(4, 301), random(75, 4), random(2, 301)
    adapter = multiply.adapter(a, b, 1.0)
    multiply(x, None, adapter)
    b.zero_()
    assert torch.equal(multiply(x, None, adapter), multiply(x, None))


def test_what_it_does_not_take_is_computed_by_torch(weight: Tensor) -> None:
    multiply = packed_bf16_weight(weight)
    assert multiply is not None
    layer = torch.nn.Linear(301, 75, bias=False)
    for dtype, rows in ((torch.float32, 3), (BF16, few_rows_bf16.MOST_ROWS + 1)):
        layer.weight = torch.nn.Parameter(weight.to(dtype))
        x = torch.randn(rows, 301).to(dtype)
        assert not multiply.takes(x)
        assert torch.equal(packed.CompiledLinear(layer, multiply)(x), F.linear(x, weight.to(dtype)))


# --- in the engine ------------------------------------------------------------------------------------------


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch, weight: Tensor) -> list[bool]:
    """Small layers are packed; the list says of each product whether it had an adapter."""
    called: list[bool] = []
    plain: Callable[..., Tensor] = PackedBf16Weight.__call__

    def counted(self: PackedBf16Weight, states: Tensor, bias: Tensor | None, adapter: Any = None) -> Tensor:
        called.append(adapter is not None)
        return plain(self, states, bias, adapter)

    monkeypatch.setattr(PackedBf16Weight, "__call__", counted)
    monkeypatch.setattr(packed, "_SMALLEST", 1)
    monkeypatch.setattr(elementwise, "_LARGE", 1)
    monkeypatch.setitem(tiny._HEAD, "head_dim", 64)
    return called


def log_probs_of(model: Any, prompt: list[int], ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def assert_as_exact_as_torch(model: Any, groups: list[list[Completion]]) -> None:
    """The mean error of the log-probs, measured against the same weights in float64."""
    exact = copy.deepcopy(model).double()
    errors: list[Tensor] = []
    usual: list[Tensor] = []
    for prompt, group in zip(PROMPTS, groups):
        for answer in group:
            expected = log_probs_of(exact, prompt, answer.ids)
            errors.append((torch.tensor(answer.log_probs) - expected).abs())
            usual.append((log_probs_of(model, prompt, answer.ids) - expected).abs())
    step = 2**-20  # of a log-prob near -9 in float32
    assert torch.cat(errors).mean() < 1.25 * torch.cat(usual).mean() + step < 0.1


@pytest.mark.parametrize("kind", ["qwen3", "smollm"])
def test_the_engine_samples_what_the_model_computes(
    products: list[bool], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch)
    model = tiny.make(kind).to(BF16)
    answers = NativeEngine(model).generate(
        [Request(prompt, n=3, seed=1) for prompt in PROMPTS], Sampling(max_tokens=40)
    )
    assert products and not any(products) and min(calls.values()) > 0
    assert_as_exact_as_torch(model, answers)


def test_sampled_log_probs_under_lora_are_recomputed_ones(products: list[bool]) -> None:
    """The copies of frozen weights stay, those of the adapter are made again for each version."""
    model = tiny.with_lora().to(BF16)
    engine = NativeEngine(model)
    for version in (1, 2):
        groups = engine.generate([Request(p, n=2, seed=1) for p in PROMPTS], Sampling(max_tokens=12))
        assert_as_exact_as_torch(model, groups)
        assert any(products) and not any("forward" in layer.__dict__ for layer in model.modules())
        products.clear()
        with torch.no_grad():
            for layer in adapted_layers(model):
                for adapter in (layer.lora_A, layer.lora_B):
                    adapter["default"].weight.data.add_(random(*adapter["default"].weight.shape) * 0.1)
        engine.update_weights([], version=version)


def test_a_model_in_bf16_attends_with_the_compiled_function(
    products: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    compute = attention.decode_attention

    def watched(query: Tensor, *given: Any) -> Tensor:
        seen.append(query.dtype)
        return compute(query, *given)

    monkeypatch.setattr(attention, "decode_attention", watched)
    model = tiny.make("qwen3").to(BF16)
    NativeEngine(model).generate([Request(PROMPTS[1])], Sampling(max_tokens=8))
    assert set(seen) == {BF16} and decode_attention.NAME in sampling_patches(model)


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_model_of_ordinary_width_is_sampled_with_all_of_them(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """With every limit as it is."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval().to(dtype)
    calls = watch(monkeypatch)
    drawn: list[int] = []
    plain = draw.draw

    def watched(logits: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        drawn.append(len(logits))
        return plain(logits, *given)

    monkeypatch.setattr(draw, "draw", watched)
    prompt_tokens: list[int] = []
    attend = packed_attention.packed_attention

    def attend_prompts(q: Tensor, *given: Any, **options: Any) -> Tensor:
        prompt_tokens.append(len(q))
        return attend(q, *given, **options)

    monkeypatch.setattr(packed_attention, "packed_attention", attend_prompts)
    engine = NativeEngine(model)
    groups = engine.generate([Request(prompt, n=2) for prompt in PROMPTS], Sampling(max_tokens=40))
    probe = torch.zeros(1, 1, 64, dtype=dtype)
    assert bool(prompt_tokens) == packed_attention.takes(probe, probe, probe)
    assert min(calls.values()) > 0 and drawn and engine.borrowed_model.packed.changes
    assert {decode_attention.NAME, "rms_norm_cpu"} <= set(sampling_patches(model))
    assert_as_exact_as_torch(model, groups)
