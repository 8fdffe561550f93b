"""Dequantisation of NF4 on a GPU as one Triton kernel: half a byte in, one number out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strop.models.nf4.format import BLOCK

_BYTES = 1024
"""Bytes of a program."""


@triton.jit
def _dequantize(packed, scales, levels, out, count, HALF: tl.constexpr, BYTES: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BYTES
    place = start + tl.arange(0, BYTES)
    inside = place < count
    byte = tl.load(packed + place, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + place // HALF, mask=inside, other=0.0)
    first = (tl.load(levels + (byte >> 4)) * scale).to(out.dtype.element_ty)
    second = (tl.load(levels + (byte & 15)) * scale).to(out.dtype.element_ty)
    target = 2 * start + tl.arange(0, 2 * BYTES)
    tl.store(out + target, tl.interleave(first, second), mask=target < 2 * count)


def dequantize(packed: Tensor, scales: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix that these bytes and scales stand for. `levels`: the 16 levels on the device."""
    out = torch.empty(len(packed), 2 * packed.shape[1], dtype=dtype, device=packed.device)
    count = packed.numel()
    _dequantize[(triton.cdiv(count, _BYTES),)](
        packed, scales, levels, out, count, HALF=BLOCK // 2, BYTES=_BYTES, num_warps=4
    )
    return out
