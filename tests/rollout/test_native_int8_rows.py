"""Compiled int8 products: the integers of plain torch, for every size, precision and thread count."""

from __future__ import annotations

import pytest
import torch

from strop.cpu import compiler
from strop.rollout.native.cpu import int8_rows
from strop.rollout.native.cpu.int8_rows import PackedInt8
from strop.rollout.native.quantization import layers
from strop.rollout.native.quantization.formats import INT8, plain_quantize_rows, product
from tests.rollout import tiny

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
def test_a_row_has_the_same_bits_with_any_other_rows_and_threads(dtype: torch.dtype) -> None:
    copy = packed(torch.randn(OUTS, INS).to(dtype))
    states = torch.randn(40, INS).to(dtype)
    bias = torch.randn(OUTS).to(dtype)
    whole = copy(states, bias)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(copy(states, bias), whole)
    finally:
        torch.set_num_threads(before)
    for rows in (1, 7, 12):
        assert torch.equal(copy(states[-rows:], bias), whole[-rows:])


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


def test_a_processor_without_int8_products_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    room(torch.float32, OUTS, INS)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setattr(compiler, "_arm_features", lambda: ["fp", "asimd"])
    assert compiler._flags(torch.float32, False, True) is None
    assert compiler._flags(torch.float32, False, False) is not None
