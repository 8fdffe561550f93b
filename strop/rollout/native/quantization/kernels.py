"""Triton kernels of 8-bit products: quantise each row of a matrix with a scale of its own, also in the kernel
that computes it, and scale the sums of an integer product. `shortened` is a part of kernels that write to a
KV cache of 8 bits. This file needs Triton and is imported only on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strop.models.kernels import gated, normed

_COLUMNS = 1024
"""Outputs of one program of `scale_sums`."""
_GATES = 4096
_GATE_WARPS = 16


@triton.jit
def _quantize(x, values, scales, size, stride, largest, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    numbers = tl.load(x + row * stride + column, mask=inside, other=0.0)
    ratio, scale = _quantized(numbers, largest, BLOCK, ROUND)
    tl.store(values + row * size + column, ratio.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _quantized(numbers, largest, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    """One row, zeros behind its end, as multiples of a scale."""
    wide = numbers.to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(wide), 0), tl.sum(wide * 0.0, 0), largest)
    return _ratio(wide, scale, BLOCK, ROUND), scale


@triton.jit
def _scale_of(most, none, largest):
    """`none`: zero, or NaN if the row has a NaN or an infinity: a maximum may pass over a NaN."""
    return tl.maximum(tl.div_rn(most, largest), 1e-12) + none


@triton.jit
def _ratio(wide, scale, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    ratio = tl.div_rn(wide, tl.zeros([BLOCK], tl.float32) + scale)
    if ROUND:
        ratio = tl.floor(ratio + 0.5)
    return ratio


def quantize_rows(rows: Tensor, values: Tensor, scales: Tensor, largest: float) -> None:
    """See formats.quantize_rows. `values` and `scales` are contiguous."""
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count, size = rows.shape
    if count == 0:
        return
    block = triton.next_power_of_2(size)
    _quantize[(count,)](
        rows,
        values,
        scales,
        size,
        rows.stride(0),
        largest,
        BLOCK=block,
        ROUND=not values.dtype.is_floating_point,
        num_warps=_warps(block),
    )


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit
def _norm(
    x, weight, out, values, scales, size, stride, eps, largest, BLOCK: tl.constexpr, ROUND: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    numbers = tl.load(x + row * stride + column, mask=inside, other=0.0)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    result = normed(numbers, factor, size, eps, out.dtype.element_ty)
    tl.store(out + row * size + column, result, mask=inside)
    ratio, scale = _quantized(result, largest, BLOCK, ROUND)
    tl.store(values + row * size + column, ratio.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def norm_and_quantize(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, values: Tensor, scales: Tensor, largest: float
) -> None:
    """kernels.rms_norm of the rows of `x` [n, size], and its quantized rows."""
    count, size = x.shape
    block = triton.next_power_of_2(size)
    _norm[(count,)](
        x, weight, out, values, scales, size, x.stride(0), eps, largest,
        BLOCK=block, ROUND=not values.dtype.is_floating_point, num_warps=min(8, _warps(block)),
    )  # fmt: skip


@triton.jit
def _gate(
    gate, up, out, values, scales, size, gate_row, up_row, largest,
    CHUNK: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """A row is too long for the registers of many programs, so it is read again when its scale is known."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([CHUNK], tl.float32)
    none = tl.zeros([CHUNK], tl.float32)
    for start in range(0, size, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < size
        x = tl.load(gate + row * gate_row + column, mask=inside, other=0.0)
        factor = tl.load(up + row * up_row + column, mask=inside, other=0.0)
        result = gated(x, factor, out.dtype.element_ty)
        tl.store(out + row * size + column, result, mask=inside)
        wide = result.to(tl.float32)
        most = tl.maximum(most, tl.abs(wide))
        none += wide * 0.0
    scale = _scale_of(tl.max(most, 0), tl.sum(none, 0), largest)
    tl.debug_barrier()  # only this program reads it back
    for start in range(0, size, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < size
        result = tl.load(out + row * size + column, mask=inside, other=0.0)
        ratio = _ratio(result.to(tl.float32), scale, CHUNK, ROUND)
        tl.store(values + row * size + column, ratio.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def gate_and_quantize(
    gate: Tensor, up: Tensor, out: Tensor, values: Tensor, scales: Tensor, largest: float
) -> None:
    """kernels.gated_silu of rows [n, size], and its quantized rows."""
    count, size = gate.shape
    _gate[(count,)](
        gate, up, out, values, scales, size, gate.stride(0), up.stride(0), largest,
        CHUNK=_GATES, ROUND=not values.dtype.is_floating_point, num_warps=_GATE_WARPS,
    )  # fmt: skip


@triton.jit
def _scale(sums, row_scales, column_scales, bias, out, size, stride, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    scaled = tl.load(sums + row * stride + column, mask=inside, other=0).to(tl.float32)
    scaled *= tl.load(row_scales + row)
    scaled *= tl.load(column_scales + column, mask=inside, other=0.0)
    if BIAS:
        scaled += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, scaled.to(out.dtype.element_ty), mask=inside)


def scale_sums(
    sums: Tensor, row_scales: Tensor, column_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """sums [rows, columns] times both scales, plus the bias, in `dtype`."""
    rows, size = sums.shape
    out = torch.empty(rows, size, dtype=dtype, device=sums.device)
    if rows == 0:
        return out
    block = min(_COLUMNS, triton.next_power_of_2(size))
    _scale[(rows, triton.cdiv(size, block))](
        sums,
        row_scales,
        column_scales,
        sums if bias is None else bias,
        out,
        size,
        sums.stride(0),
        BLOCK=block,
        BIAS=bias is not None,
        num_warps=4,
    )
    return out


@triton.jit
def shortened(x):
    """The numbers of one head of one token in 8 bits and their exponent: cache.in_8_bits."""
    wide = x.to(tl.float32)
    bits = tl.max(tl.abs(wide), 0).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 254)
    ratio = wide * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    size = tl.abs(ratio)
    bits = size.to(tl.int32, bitcast=True)
    # To the nearest number with three bits after the first, and below 2^-6 to a multiple of 2^-9; to even.
    code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    code = tl.where(size < 0.015625, (size + 16384.0).to(tl.int32, bitcast=True) & 15, code)
    code += (ratio.to(tl.int32, bitcast=True) >> 24) & 128
    # Every number that is finite fits. Not by their maximum, which may pass over a NaN.
    finite = tl.min((size <= 448.0).to(tl.int32), 0) == 1
    code = tl.where(finite, code, 0)
    exponent = tl.where(finite, exponent, 255)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True), exponent.to(tl.uint8)
