"""NF4 (Dettmers et al. 2023): 16 levels at quantiles of a normal distribution, and a scale for 64 numbers.

The numbers equal those of bitsandbytes (quant_type nf4, block size 64, no double quantisation). A weight
takes 4.5 bits: half a byte, and a float32 scale for 64 of them.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 64
"""Numbers that share a scale: the largest absolute value among them."""
BITS = 4 + 32 / BLOCK
"""Bits of a stored weight, its share of the scale included."""
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_AT_ONCE = 1 << 24
"""Numbers that are quantised at a time: the copies of a large matrix in float32 would take gigabytes."""


def fits(weight: Tensor) -> bool:
    """Whether the rows of a matrix are whole blocks."""
    return weight.dim() == 2 and weight.shape[1] % BLOCK == 0


@torch.no_grad()
def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest levels of a matrix [rows, columns], two in a byte (the first in the upper bits), as
    [rows, columns / 2]; and the scales [rows, columns / 64] in float32."""
    rows, columns = weight.shape
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.float32, device=weight.device)
    step = max(1, _AT_ONCE // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        packed[part], scales[part] = _quantize(weight[part])
    return packed, scales


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.float().view(len(weight), -1, BLOCK)
    scales = blocks.abs().amax(-1)
    divisors = scales.masked_fill(scales == 0, 1.0)
    levels = torch.tensor(LEVELS, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / divisors[..., None], middles, out_int32=True)
    codes = codes.to(torch.uint8).view(len(weight), -1, 2)
    return codes[..., 0] << 4 | codes[..., 1], scales


def dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix that these bytes and scales stand for."""
    rows, columns = len(packed), 2 * packed.shape[1]
    pairs = _pairs(packed.device).index_select(0, packed.view(-1).int())
    blocks = pairs.view(-1, BLOCK).mul_(scales.view(-1, 1))
    return blocks.to(dtype).view(rows, columns)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Both levels of each byte."""
    levels = torch.tensor(LEVELS)
    byte = torch.arange(256)
    return torch.stack([levels[byte >> 4], levels[byte & 15]], -1).to(device)
