"""base + scale · (x Aᵀ) Bᵀ, the sum of a LoRA layer, in two Triton kernels with the same bits for any number
of rows.

cuBLAS divides the inner sum of x Aᵀ by a number that depends on the rows, because the output is narrow: a
decode step and a training pass would get other bits. Here every program has 64 rows and walks over its part
of the inner dimension in one order; the parts have a fixed length and are added in their order by the second
kernel. A and B may be float32; products are computed in the precision of x.

Layers that take the same states (q, k and v; gate and up) can be computed together: the programs of all of
them are then in one launch, and each does what it does alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_ROWS = 64
"""Rows of a program: never fewer, because smaller tiles use instructions that add in another order."""
_STEP = 64
_COLUMNS = 128
_MOST_LAYERS = 3


def part_length(inner: int) -> int:
    """Inner dimension of a program: short, so that a decode step has programs for the whole GPU, but not so
    many parts that adding them takes longer. It depends on the layer only, never on the rows."""
    if inner <= 2048:
        return 256
    return 512 if inner <= 8192 else 1024


@triton.jit
def _project(
    x, a, parts, rows, inner, rank, x_row, a_row,
    PARTS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, RANK)
    total = tl.zeros([ROWS, RANK], tl.float32)
    for begin in range(part * PART, tl.minimum((part + 1) * PART, inner), STEP):
        k = begin + tl.arange(0, STEP)
        states = tl.load(
            x + row[:, None] * x_row + k[None, :],
            mask=(row[:, None] < rows) & (k[None, :] < inner), other=0.0,
        )  # fmt: skip
        weights = tl.load(
            a + (layer * rank + r[None, :]) * a_row + k[:, None],
            mask=(r[None, :] < rank) & (k[:, None] < inner), other=0.0,
        )  # fmt: skip
        total = tl.dot(states, weights.to(x.dtype.element_ty), total, input_precision="ieee")
    target = parts + ((layer * PARTS + part) * rows + row[:, None]) * rank + r[None, :]
    tl.store(target, total, mask=(row[:, None] < rows) & (r[None, :] < rank))


@triton.jit
def _expand(
    parts, b, base, out, narrow, scale, rows, rank, base_row, out_row, b_row, first, second, third,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # Blocks of columns are numbered through all layers: first, second and third are their columns.
    block = tl.program_id(1)
    first_blocks = tl.cdiv(first, COLUMNS)
    second_blocks = tl.cdiv(second, COLUMNS)
    is_later = (block >= first_blocks).to(tl.int32)
    is_third = (block >= first_blocks + second_blocks).to(tl.int32)
    layer = (is_later + is_third).to(tl.int64)
    block -= is_later * first_blocks + is_third * second_blocks
    start = is_later * first + is_third * second
    columns = first + is_later * (second - first) + is_third * (third - second)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    inside = (row[:, None] < rows) & (r[None, :] < rank)
    total = tl.zeros([ROWS, RANK], tl.float32)
    for part in range(PARTS):
        source = parts + ((layer * PARTS + part) * rows + row[:, None]) * rank + r[None, :]
        total += tl.load(source, mask=inside, other=0.0)
    states = total.to(narrow.dtype.element_ty)
    if block == 0:
        tl.store(narrow + (layer * rows + row[:, None]) * rank + r[None, :], states, mask=inside)
    weights = tl.load(
        b + (start + column[None, :]) * b_row + r[:, None],
        mask=(column[None, :] < columns) & (r[:, None] < rank), other=0.0,
    )  # fmt: skip
    delta = tl.dot(states, weights.to(narrow.dtype.element_ty), input_precision="ieee") * scale
    here = (row[:, None] < rows) & (column[None, :] < columns)
    place = start + column[None, :]
    before = tl.load(base + row[:, None] * base_row + place, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * out_row + place, (before + delta).to(out.dtype.element_ty), mask=here)


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


def _add(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, sizes: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """`sizes`: the columns of each layer, where `base`, `a` and `b` are those of several."""
    rows, inner = x.shape
    sizes = tuple(sizes) or (len(b),)
    rank = len(a) // len(sizes)
    length = part_length(inner)
    num_parts = triton.cdiv(inner, length)
    blocks = triton.cdiv(rows, _ROWS)
    width = max(16, triton.next_power_of_2(rank))
    parts = torch.empty(len(sizes), num_parts, rows, rank, dtype=torch.float32, device=x.device)
    narrow = torch.empty(len(sizes) * rows, rank, dtype=x.dtype, device=x.device)
    out = torch.empty(rows, len(b), dtype=base.dtype, device=x.device)
    _project[(blocks, num_parts, len(sizes))](
        x, a, parts, rows, inner, rank, x.stride(0), a.stride(0),
        PARTS=num_parts, PART=length, ROWS=_ROWS, STEP=_STEP, RANK=width, num_warps=4,
    )  # fmt: skip
    _expand[(blocks, sum(triton.cdiv(size, _COLUMNS) for size in sizes))](
        parts, b, base, out, narrow, scale, rows, rank, base.stride(0), out.stride(0), b.stride(0),
        *sizes, *(0 for _ in range(_MOST_LAYERS - len(sizes))),
        PARTS=num_parts, ROWS=_ROWS, COLUMNS=_COLUMNS, RANK=width, num_warps=4,
    )  # fmt: skip
    return out, narrow


def add_lora(base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`base` [..., out] + scale · (`x` [..., in] @ `a` [rank, in].T) @ `b` [out, rank].T."""
    result: Tensor = _AddLora.apply(_flat(base), _flat(x), a.contiguous(), b.contiguous(), scale)
    return result.view(base.shape)


def add_lora_to_all(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, sizes: Sequence[int]
) -> Tensor:
    """The same for two or three layers that take the same states, without gradients: `base`, `a` [layers *
    rank, in] and `b` are theirs one after the other, and `sizes` are their outputs."""
    out, _ = _add(_flat(base), _flat(x), a, b, scale, sizes)
    return out.view(base.shape)


def _flat(states: Tensor) -> Tensor:
    rows = states.reshape(-1, states.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
