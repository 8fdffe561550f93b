"""A product of few rows and a large weight in Triton, for decode steps with few sequences.

Such a product only reads its weight. The matrix instruction computes 64 outputs by 16 or 32 rows, while
cuBLAS fills 64 rows with zeros and reads the weight more slowly. Sums run over the inputs in order, in
float32, as in cuBLAS's product of many rows; few_rows.py compares the bits before use. This file needs Triton
and is imported only on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 64
"""Outputs of one program; the number of outputs of a weight is a multiple."""
CHUNK = 128
"""Inputs per iteration; the number of inputs of a part is a multiple."""


@triton.jit
def _product(
    rows, weight, out, count, inner, outputs, row_stride, weight_stride,
    OUTPUTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    at = part * inner + tl.arange(0, CHUNK)
    weights = weight + column[:, None].to(tl.int64) * weight_stride + at[None, :]
    states = rows + row[None, :] * row_stride + at[:, None]
    there = (row < count)[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for _ in range(0, inner, CHUNK):
        total = tl.dot(tl.load(weights), tl.load(states, mask=there, other=0.0), total)
        weights += CHUNK
        states += CHUNK
    place = (part * count + row[None, :]) * outputs + column[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)


def product(rows: Tensor, weight: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
    """`rows` [n, in] @ `weight` [out, in].T for the inputs of each part alone: [parts, n, out] in `dtype`."""
    count, inputs = rows.shape
    outputs = len(weight)
    out = torch.empty(parts, count, outputs, dtype=dtype, device=rows.device)
    blocks = outputs // OUTPUTS
    # Three programs of three stages fit on a multiprocessor, or two of five.
    stages = 5 if blocks * parts <= 2 * _multiprocessors(rows.device) else 3
    _product[(blocks, parts)](
        rows, weight, out, count, inputs // parts, outputs, rows.stride(0), weight.stride(0),
        OUTPUTS=OUTPUTS, CHUNK=CHUNK, ROWS=16 if count <= 16 else 32, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
