"""Compiled int8 products: the integers of plain torch, for every size, precision and thread count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop.cpu import compiler
from strop.models.patches import DEVICE_PATCHES, MODEL_PATCHES, ROLLOUT_NAMES, choose_patches
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.cpu import int8_rows
from strop.rollout.native.cpu.int8_rows import PackedInt8
from strop.rollout.native.cpu.packed_linear import PACKED_LINEAR
from strop.rollout.native.quantization import layers
from strop.rollout.native.quantization.formats import INT8, plain_quantize_rows, product
from tests.rollout import tiny
from tests.rollout.test_native import PROMPTS

INS = 304
OUTS = 72
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def room(dtype: torch.dtype, outs: int, ins: int) -> PackedInt8:
    found = int8_rows.packed_int8(dtype, outs, ins)
    if found is None:
        pytest.skip("no compiler, or a CPU without int8 dot products")
    return found


def packed(weight: torch.Tensor) -> PackedInt8:
    copy = room(weight.dtype, *weight.shape)
    copy.fill(weight, 0)
    return copy


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 64, 300])
@pytest.mark.parametrize("outs", [OUTS, 8, 968])
def test_products_have_the_integers_of_torch(dtype: torch.dtype, rows: int, outs: int) -> None:
    weight = torch.randn(outs, INS).to(dtype)
    states = (torch.randn(rows, INS) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    bias = torch.randn(outs).to(dtype)
    copy = packed(weight)
    values, scales = plain_quantize_rows(INT8, weight)
    assert torch.equal(copy.scales, scales)
    # Without a bias nothing is added, so not even the compiler can round otherwise.
    assert torch.equal(copy(states[None], None)[0], product(INT8, states, values, scales, None))
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(copy(states, bias), product(INT8, states, values, scales, bias), **close)


def test_the_largest_sums_are_exact() -> None:
    """Some instructions add pairs of products in 16 bits, which overflows."""
    ins = 4864
    weight = torch.ones(8, ins)
    states = torch.ones(3, ins)
    states[1] = -1
    assert packed(weight)(states, None).tolist() == [[ins] * 8, [-ins] * 8, [ins] * 8]


@DTYPES
@pytest.mark.parametrize("rows", [1, 8, 13, 300])
@pytest.mark.parametrize("rank", [1, 16, 21])
def test_an_adapter_is_added_without_rounding_to_8_bits(dtype: torch.dtype, rows: int, rank: int) -> None:
    copy = packed((torch.randn(OUTS, INS) / INS**0.5).to(dtype))
    states = torch.randn(rows, INS).to(dtype)
    a, b = (torch.randn(rank, INS) / INS**0.5).to(dtype), (torch.randn(OUTS, rank) / rank**0.5).to(dtype)
    bias = torch.randn(OUTS).to(dtype)
    plain = copy(states, bias).double()
    expected = plain + 0.7 * (states.double() @ a.double().t()) @ b.double().t()
    found = copy(states[None], bias, copy.adapter(a, b, 0.7))[0].double()
    # In bf16 both results are rounded, by at most 2^-8 of their size.
    rounding = 0 if dtype == torch.float32 else 2**-8
    assert ((found - expected).abs() <= 3e-6 + rounding * (found.abs() + plain.abs())).all()


def test_an_adapter_that_is_trained_is_read_again() -> None:
    copy = packed(torch.randn(OUTS, INS))
    states = torch.randn(3, INS)
    b = torch.randn(OUTS, 4)
    adapter = copy.adapter(torch.randn(4, INS), b, 1.0)
    assert not torch.equal(copy(states, None, adapter), copy(states, None))
    b.zero_()
    assert torch.equal(copy(states, None, adapter), copy(states, None))


@DTYPES
@pytest.mark.parametrize("adapted", [False, True])
def test_a_row_has_the_same_bits_with_any_other_rows_and_threads(dtype: torch.dtype, adapted: bool) -> None:
    copy = packed(torch.randn(OUTS, INS).to(dtype))
    states = torch.randn(40, INS).to(dtype)
    bias = torch.randn(OUTS).to(dtype)
    adapter = copy.adapter(torch.randn(6, INS), torch.randn(OUTS, 6), 0.5) if adapted else None
    whole = copy(states, bias, adapter)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(copy(states, bias, adapter), whole)
    finally:
        torch.set_num_threads(before)
    for rows in (1, 7, 12):
        assert torch.equal(copy(states[-rows:], bias, adapter), whole[-rows:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_number_spoils_its_row_and_no_other(bad: float) -> None:
    states = torch.randn(11, INS)
    states[9, 5] = bad
    out = packed(torch.randn(OUTS, INS))(states, torch.randn(OUTS))
    assert out[9].isnan().all() and out[:9].isfinite().all() and out[10].isfinite().all()


def test_a_bad_weight_spoils_its_output_and_no_other() -> None:
    weight = torch.randn(OUTS, INS)
    weight[33, 7] = float("nan")
    out = packed(weight)(torch.randn(5, INS), None)
    assert out[:, 33].isnan().all() and out[:, :33].isfinite().all() and out[:, 34:].isfinite().all()


def test_rows_of_zeros_and_no_rows() -> None:
    copy = packed(torch.randn(OUTS, INS))
    assert (copy(torch.zeros(2, INS), None) == 0).all()
    assert copy(torch.zeros(2, 0, INS), None).shape == (2, 0, OUTS)


def test_layers_that_share_a_panel() -> None:
    """Sizes that are no multiples of the panel of any CPU, written one after the other, and once more."""
    weights = [torch.randn(outs, INS) for outs in (40, 8, 24, 16)]
    whole = torch.cat(weights)
    copy = room(torch.float32, *whole.shape)
    for _ in range(2):
        start = 0
        for weight in weights:
            copy.fill(weight, start)
            start += len(weight)
    states = torch.randn(5, INS)
    assert torch.equal(copy(states, None), packed(whole)(states, None))


def test_strided_states_and_weights() -> None:
    weight = torch.randn(INS, OUTS).t()
    states = torch.randn(4, 6, INS).transpose(0, 1)[:, ::2]
    expected = packed(weight.contiguous())(states.contiguous(), None)
    assert torch.equal(packed(weight)(states, None), expected)


def test_the_engine_uses_it_for_the_layers_that_it_can_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    room(torch.float32, OUTS, INS)
    copies = layers.QuantizedLayers(tiny.make(), "int8")
    copies.apply([])
    kinds = {type(weight) for weight in copies._weights}
    assert kinds == {layers.CompiledWeight}
    monkeypatch.setattr(layers, "packed_int8", lambda *_: None)
    others = layers.QuantizedLayers(tiny.make(), "int8")
    others.apply([])
    assert {type(weight) for weight in others._weights} == {layers.QuantizedWeight}


def test_the_engine_adds_adapters_in_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers and log-probs are those of adapters that peft adds, also after both were changed."""
    room(torch.float32, OUTS, INS)
    adapted: list[bool] = []
    compute = PackedInt8.__call__

    def watched(self: PackedInt8, states: torch.Tensor, bias: Any, adapter: Any = None) -> torch.Tensor:
        adapted.append(adapter is not None)
        return compute(self, states, bias, adapter)

    monkeypatch.setattr(PackedInt8, "__call__", watched)
    model, other = tiny.with_lora(), tiny.with_lora()
    other.load_state_dict(model.state_dict())
    every = [patch.name for patch in (*MODEL_PATCHES, *DEVICE_PATCHES)]
    choose_patches(other, [name for name in (*every, *ROLLOUT_NAMES) if name != PACKED_LINEAR.name])
    engines = [NativeEngine(one, quantization="int8") for one in (model, other)]
    for version in (1, 2):
        found = []
        for engine, in_product in zip(engines, (True, False)):
            adapted.clear()
            found.append(
                engine.generate([Request(p) for p in PROMPTS], Sampling(temperature=0, max_tokens=8))
            )
            assert adapted and set(adapted) == {in_product}
        for ours, theirs in zip(*found):
            assert ours[0].ids == theirs[0].ids
            assert ours[0].log_probs == pytest.approx(theirs[0].log_probs, abs=1e-5)
        with torch.no_grad():
            for path, weight in model.named_parameters():
                if "lora_B" in path or "base_layer" in path:
                    weight.mul_(0.9)
        other.load_state_dict(model.state_dict())
        for engine in engines:
            engine.update_weights([], version=version)


def test_frozen_weights_are_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    room(torch.float32, OUTS, INS)
    filled: list[torch.Tensor] = []
    fill = PackedInt8.fill

    def watched(self: PackedInt8, weight: torch.Tensor, first: int) -> None:
        filled.append(weight)
        fill(self, weight, first)

    monkeypatch.setattr(PackedInt8, "fill", watched)
    model = tiny.with_lora()
    engine = NativeEngine(model, quantization="int8")
    layer = next(part for path, part in model.named_modules() if path.endswith("up_proj.base_layer"))
    counts = []
    for version in range(1, 5):
        engine.generate([Request(PROMPTS[0])], Sampling(max_tokens=3))
        counts.append(len(filled))
        if version == 2:
            layer.weight.data[0, 0] += 1  # no new version of the tensor
        engine.update_weights([], version=version)
    assert counts[0] == counts[1] > 1 and counts[2] == counts[3] == counts[1] + 1
    assert filled[-1] is layer.weight
    engine.sleep()  # the copies go
    engine.wake()
    engine.generate([Request(PROMPTS[0])], Sampling(max_tokens=3))
    assert len(filled) == counts[3] + counts[0]


def test_a_processor_without_int8_products_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    room(torch.float32, OUTS, INS)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setattr(compiler, "_arm_features", lambda: ["fp", "asimd"])
    assert compiler._flags(torch.float32, False, True) is None
    assert compiler._flags(torch.float32, False, False) is not None
