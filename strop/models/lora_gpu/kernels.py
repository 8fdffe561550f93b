"""base + scale · (x Aᵀ) Bᵀ, the sum of a LoRA layer, in two Triton kernels with the same bits for any number
of rows.

cuBLAS divides the inner sum of x Aᵀ by a number that depends on the rows, because the output is narrow: a
decode step and a training pass would get other bits. Here every program has 64 rows and walks over its part
of the inner dimension in one order; the parts have a fixed length and are added in their order by the second
kernel. A and B may be float32; products are computed in the precision of x.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_ROWS = 64
"""Rows of a program: never fewer, because smaller tiles use instructions that add in another order."""
_STEP = 64
_PART = 1024
"""Inner dimension of a program."""
_COLUMNS = 128


@triton.jit
def _project(
    x, a, parts, rows, inner, rank, x_row, a_row,
    PART: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    r = tl.arange(0, RANK)
    total = tl.zeros([ROWS, RANK], tl.float32)
    for begin in range(part * PART, tl.minimum((part + 1) * PART, inner), STEP):
        k = begin + tl.arange(0, STEP)
        states = tl.load(
            x + row[:, None] * x_row + k[None, :],
            mask=(row[:, None] < rows) & (k[None, :] < inner), other=0.0,
        )  # fmt: skip
        weights = tl.load(
            a + r[None, :] * a_row + k[:, None],
            mask=(r[None, :] < rank) & (k[:, None] < inner), other=0.0,
        )  # fmt: skip
        total = tl.dot(states, weights.to(x.dtype.element_ty), total, input_precision="ieee")
    target = parts + (part * rows + row[:, None]) * rank + r[None, :]
    tl.store(target, total, mask=(row[:, None] < rows) & (r[None, :] < rank))


@triton.jit
def _expand(
    parts, b, base, out, narrow, scale, rows, columns, rank, base_row, b_row,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    inside = (row[:, None] < rows) & (r[None, :] < rank)
    total = tl.zeros([ROWS, RANK], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + (part * rows + row[:, None]) * rank + r[None, :], mask=inside, other=0.0)
    states = total.to(narrow.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(narrow + row[:, None] * rank + r[None, :], states, mask=inside)
    weights = tl.load(
        b + column[None, :] * b_row + r[:, None],
        mask=(column[None, :] < columns) & (r[:, None] < rank), other=0.0,
    )  # fmt: skip
    delta = tl.dot(states, weights.to(narrow.dtype.element_ty), input_precision="ieee") * scale
    here = (row[:, None] < rows) & (column[None, :] < columns)
    before = tl.load(base + row[:, None] * base_row + column[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(
        out + row[:, None] * columns + column[None, :], (before + delta).to(out.dtype.element_ty), mask=here
    )


class _AddLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        out, narrow = _add(base, x, a, b, scale)
        ctx.save_for_backward(x, narrow, a, b)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> Any:
        x, narrow, a, b = ctx.saved_tensors
        grad = above.to(x.dtype)
        inner = (grad @ b.to(x.dtype)) * ctx.scale
        wants = ctx.needs_input_grad
        return (
            above if wants[0] else None,
            inner @ a.to(x.dtype) if wants[1] else None,
            _wide_product(inner, x).to(a.dtype) if wants[2] else None,
            (_wide_product(grad, narrow) * ctx.scale).to(b.dtype) if wants[3] else None,
            None,
        )


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right of 16-bit factors, in float32: the gradient of a float32 weight is not rounded before."""
    if left.is_cuda:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return left.float().t() @ right.float()


def _add(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rows, inner = x.shape
    rank, columns = len(a), len(b)
    num_parts = triton.cdiv(inner, _PART)
    blocks = triton.cdiv(rows, _ROWS)
    width = max(16, triton.next_power_of_2(rank))
    parts = torch.empty(num_parts, rows, rank, dtype=torch.float32, device=x.device)
    narrow = torch.empty(rows, rank, dtype=x.dtype, device=x.device)
    out = torch.empty(rows, columns, dtype=base.dtype, device=x.device)
    _project[(blocks, num_parts)](
        x, a, parts, rows, inner, rank, x.stride(0), a.stride(0),
        PART=_PART, ROWS=_ROWS, STEP=_STEP, RANK=width, num_warps=4,
    )  # fmt: skip
    _expand[(blocks, triton.cdiv(columns, _COLUMNS))](
        parts, b, base, out, narrow, scale, rows, columns, rank, base.stride(0), b.stride(0),
        PARTS=num_parts, ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=width, num_warps=4,
    )  # fmt: skip
    return out, narrow


def add_lora(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`base` [..., out] + scale · (`x` [..., in] @ `a` [rank, in].T) @ `b` [out, rank].T."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    total = base.reshape(-1, base.shape[-1])
    total = total if total.stride(-1) == 1 else total.contiguous()
    result: Tensor = _AddLora.apply(total, flat, a.contiguous(), b.contiguous(), scale)
    return result.view(base.shape)
