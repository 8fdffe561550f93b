"""A product of fp8 rows and weights that is added to the residual stream, for decode steps.

The products at the ends of a layer's branches have few outputs and many inputs: cuBLAS computes one with a
few dozen programs, which leaves most multiprocessors idle. Here the sum over the inputs is divided into parts
for different programs; a second kernel adds the parts, scales them and adds them to the stream. This file
needs Triton and a GPU whose copy engine fetches blocks of a matrix (compute capability 9.0).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_CHUNK = 128
"""Inputs per iteration."""
_MOST_ROWS = 256
"""With more rows cuBLAS has enough programs."""
_CAPABILITY = (9, 0)


@triton.jit
def _multiply(
    rows, weight, parts, count, outputs, inner, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNK: tl.constexpr
):
    blocks = tl.cdiv(count, ROWS)
    first_row = tl.program_id(0) % blocks * ROWS
    first_output = tl.program_id(0) // blocks * OUTPUTS
    part = tl.program_id(1)
    start = part * inner
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(start, start + inner, CHUNK):
        total = tl.dot(rows.load([first_row, at]), weight.load([first_output, at]).T, total)
    row = first_row + tl.arange(0, ROWS)
    column = first_output + tl.arange(0, OUTPUTS)
    target = parts + (part * count + row[:, None]).to(tl.int64) * outputs + column[None, :]
    tl.store(target, total, mask=(row < count)[:, None])


@triton.jit
def _add(
    stream,
    parts,
    row_scales,
    column_scales,
    bias,
    out,
    size,
    outputs,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    at = row * outputs + column
    total = tl.load(parts + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size + at, mask=inside, other=0.0)
    total *= tl.load(row_scales + row)
    total *= tl.load(column_scales + column, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def takes(stream: Tensor, rows: Tensor, weight: Tensor) -> bool:
    """Whether this is how to add the product of `rows` [n, inputs] and `weight` [outputs, inputs]."""
    count, inputs = rows.shape
    if not 0 < count <= _MOST_ROWS or torch.cuda.get_device_capability(rows.device) < _CAPABILITY:
        return False
    _, columns = _block(count)
    return stream.is_contiguous() and inputs % _CHUNK == 0 and len(weight) % columns == 0


def add_product(
    stream: Tensor,
    rows: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    in_place: bool,
) -> Tensor:
    """stream [n, outputs] + (rows [n, inputs] @ weight [outputs, inputs].T) · both scales + bias. All of the
    factors are e4m3, and everything is contiguous."""
    count, inputs = rows.shape
    outputs = len(weight)
    most, columns = _block(count)
    blocks = triton.cdiv(count, most) * (outputs // columns)
    divided = _parts(blocks, inputs, rows.device)
    parts = torch.empty(divided, count, outputs, dtype=torch.float32, device=rows.device)
    _multiply[(blocks, divided)](
        TensorDescriptor.from_tensor(rows, [most, _CHUNK]),
        TensorDescriptor.from_tensor(weight, [columns, _CHUNK]),
        parts, count, outputs, inputs // divided, ROWS=most, OUTPUTS=columns, CHUNK=_CHUNK,
        num_warps=4, num_stages=6 if columns == 64 else 4,
    )  # fmt: skip
    out = stream if in_place else torch.empty_like(stream)
    _add[(count, triton.cdiv(outputs, 1024))](
        stream, parts, row_scales, scales, stream if bias is None else bias, out, count * outputs, outputs,
        PARTS=divided, BIAS=bias is not None, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


def _block(count: int) -> tuple[int, int]:
    """Rows and outputs of one program."""
    return (64, 64) if count <= 64 else (64, 128)


def _parts(blocks: int, inputs: int, device: torch.device) -> int:
    """Into how many parts the inputs are divided: as many as the device computes at a time."""
    room = 2 * torch.cuda.get_device_properties(device).multi_processor_count // blocks
    for parts in (4, 2):
        if parts <= room and inputs % (parts * _CHUNK) == 0:
            return parts
    return 1
