"""NF4: levels, scales and bytes."""

from __future__ import annotations

import pytest
import torch

from strop.models.nf4.format import BITS, LEVELS, dequantize, fits, quantize
from strop.planning.shape import NF4_BYTES


def normal(*shape: int) -> torch.Tensor:
    return 0.05 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_bytes_and_scales_are_those_of_bitsandbytes() -> None:
    """Recorded with bitsandbytes 0.50.2: quantize_4bit(x, blocksize=64, quant_type="nf4")."""
    weight = torch.linspace(-1.3, 0.9, 128).sin().view(2, 64) * 0.05
    packed, scales = quantize(weight)
    assert bytes(packed.view(-1).tolist()).hex() == (
        "0000000000000000000011111111111111111112222222222333333344444455"
        "455556666777788889999aaaabbbbccccccdddddddeeeeeeeeeeeeffffffffff"
    )
    assert scales.flatten().tolist() == [0.04817790910601616, 0.039166342467069626]
    assert dequantize(packed, scales, torch.float32).double().sum().item() == pytest.approx(
        -1.0229294775053859, abs=1e-12
    )


@pytest.mark.slow
def test_random_matrices_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = normal(96, 320)
    packed, scales = quantize(weight)
    theirs, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    assert torch.equal(theirs.view(-1), packed.view(-1))
    assert torch.equal(state.absmax, scales.view(-1))
    for dtype in (torch.float32, torch.bfloat16):
        state.dtype = dtype
        found = dequantize(packed, scales, dtype)
        assert torch.equal(functional.dequantize_4bit(theirs, state, quant_type="nf4"), found)


def test_every_number_becomes_the_nearest_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.models.nf4.format._AT_ONCE", 1000)  # several pieces, the last one shorter
    weight = normal(13, 192)
    packed, scales = quantize(weight)
    found = dequantize(packed, scales, torch.float32).view(13, 3, 64)
    levels = torch.tensor(LEVELS) * weight.view(13, 3, 64).abs().amax(-1, keepdim=True)[..., None]
    nearest = (weight.view(13, 3, 64, 1) - levels).abs().amin(-1)
    assert torch.allclose((weight.view(13, 3, 64) - found).abs(), nearest, atol=1e-8)
    assert packed.shape == (13, 96) and packed.dtype == torch.uint8
    assert 8 * (packed.nbytes + scales.nbytes) == BITS * weight.numel()
    assert BITS == 8 * NF4_BYTES


def test_zeros_and_levels_are_exact() -> None:
    weight = torch.zeros(2, 64)
    weight[1] = 0.25 * torch.tensor(LEVELS).repeat(4)
    assert torch.equal(dequantize(*quantize(weight), torch.float32), weight)


def test_rows_are_whole_blocks() -> None:
    assert fits(torch.empty(3, 128)) and not fits(torch.empty(3, 96)) and not fits(torch.empty(2, 3, 64))
