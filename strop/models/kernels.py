"""Norms, rotary embeddings and gated activations of decoders, one Triton kernel each way.

They round where the modules they replace round, so that sampling and training, which both use them, agree
with each other and with the published code.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# --- root mean square norm ----------------------------------------------------------------------------------


@triton.jit
def _norm(x, weight, out, size, heads, token_stride, head_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    source = x + row // heads * token_stride + row % heads * head_stride
    values = tl.load(source + column, mask=inside, other=0.0)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * size + column, normed(values, factor, size, eps, out.dtype.element_ty), mask=inside)


@triton.jit
def normed(values, factor, size, eps, kind: tl.constexpr):
    """One row of a norm, zeros behind its end, in the dtype `kind`."""
    wide = values.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    return (scaled.to(values.dtype).to(tl.float32) * factor.to(tl.float32)).to(kind)


@triton.jit
def _norm_back(
    grad, x, weight, grad_x, partial, rows, each, size, x_stride, grad_stride, eps, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    for i in range(0, each):
        row = program * each + i
        here = inside & (row < rows)
        values = tl.load(x + row * x_stride + column, mask=here, other=0.0).to(tl.float32)
        above = tl.load(grad + row * grad_stride + column, mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
        normal = values * scale
        grad_weight += above * normal.to(x.dtype.element_ty).to(tl.float32)
        above *= factor
        inner = tl.sum(above * normal, 0) / size
        tl.store(
            grad_x + row * size + column,
            (scale * (above - normal * inner)).to(grad_x.dtype.element_ty),
            mask=here,
        )
    tl.store(partial + program * size + column, grad_weight, mask=inside)


def _normalized(x: Tensor, weight: Tensor, eps: float, out: torch.dtype) -> Tensor:
    """Of any x [..., size]; of [B, T, heads, size] also where the heads are a part of a wider tensor."""
    result = torch.empty(x.shape, dtype=out, device=x.device)
    apart = x.dim() == 4 and x.stride(3) == 1 and not x.is_contiguous()
    rows = x.flatten(0, 1) if apart else _rows(x)[:, None]
    tokens, heads, size = rows.shape
    block = triton.next_power_of_2(size)
    _norm[(tokens * heads,)](
        rows, weight, result, size, heads, rows.stride(0), rows.stride(1), eps,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return result


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, out: torch.dtype) -> Tensor:
        flat = _rows(x)  # saved as a view of q, k and v, it would keep all of them
        result = _normalized(flat, weight, eps, out)
        ctx.save_for_backward(flat, weight)
        ctx.eps = eps
        ctx.shape = x.shape
        return result.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        flat, weight = ctx.saved_tensors
        rows, size = flat.shape
        above = _rows(grad)
        grad_x = torch.empty_like(flat, memory_format=torch.contiguous_format)
        each = triton.cdiv(rows, _PROGRAMS)
        programs = triton.cdiv(rows, each)
        partial = torch.empty(programs, size, dtype=torch.float32, device=flat.device)
        block = triton.next_power_of_2(size)
        _norm_back[(programs,)](
            above, flat, weight, grad_x, partial, rows, each, size, flat.stride(0), above.stride(0), ctx.eps,
            BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        return grad_x.view(ctx.shape), partial.sum(0).to(weight.dtype), None, None


_PROGRAMS = 1024
"""Partial sums of a weight's gradient, at most; each program walks over its share of the rows."""


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))


def _rows(x: Tensor) -> Tensor:
    """[n, size] with neighbours in memory beside each other."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: torch.dtype | None = None) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) over the last axis, as Llama and its relatives define it."""
    dtype = out or torch.promote_types(x.dtype, weight.dtype)
    if not torch.is_grad_enabled():
        return _normalized(x, weight, eps, dtype)
    result: Tensor = _RmsNorm.apply(x, weight, eps, dtype)
    return result


# --- rotary embeddings --------------------------------------------------------------------------------------


@triton.jit
def _rotate(x, out, row, token, x_row, x_token, x_head, tokens, heads, size, a_cos, b_cos, a_sin, b_sin,
            HEADS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    half = size // 2
    h = tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    mask = (h[:, None] < heads) & (d[None, :] < half)
    source = x + row * x_row + token * x_token + h[:, None] * x_head + d[None, :]
    kind = x.dtype.element_ty
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    first = (a * a_cos).to(kind).to(tl.float32) - (b * a_sin).to(kind).to(tl.float32)
    second = (b * b_cos).to(kind).to(tl.float32) + (a * b_sin).to(kind).to(tl.float32)
    target = out + ((row * tokens + token) * heads + h[:, None]) * size + d[None, :]
    tl.store(target, first.to(kind), mask=mask)
    tl.store(target + half, second.to(kind), mask=mask)


@triton.jit
def _rotary(
    q, k, cos, sin, q_out, k_out, tokens, q_heads, k_heads, size,
    q_row, q_token, q_head, k_row, k_token, k_head, angle_row, angle_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // tokens
    token = tl.program_id(0).to(tl.int64) % tokens
    d = tl.arange(0, HALF)
    inside = d < size // 2
    at = row * angle_row + token * angle_token + d
    a_cos = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    b_cos = tl.load(cos + at + size // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
    a_sin = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    b_sin = tl.load(sin + at + size // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
    _rotate(
        q,
        q_out,
        row,
        token,
        q_row,
        q_token,
        q_head,
        tokens,
        q_heads,
        size,
        a_cos,
        b_cos,
        a_sin,
        b_sin,
        Q_HEADS,
        HALF,
    )
    _rotate(
        k,
        k_out,
        row,
        token,
        k_row,
        k_token,
        k_head,
        tokens,
        k_heads,
        size,
        a_cos,
        b_cos,
        a_sin,
        b_sin,
        K_HEADS,
        HALF,
    )


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    batch, q_heads, tokens, size = query.shape
    k_heads = key.shape[1]
    q_out = query.new_empty(batch, tokens, q_heads, size)
    k_out = key.new_empty(batch, tokens, k_heads, size)
    _rotary[(batch * tokens,)](
        query, key, cos, sin, q_out, k_out, tokens, q_heads, k_heads, size,
        query.stride(0), query.stride(2), query.stride(1), key.stride(0), key.stride(2), key.stride(1),
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
        Q_HEADS=triton.next_power_of_2(q_heads), K_HEADS=triton.next_power_of_2(k_heads),
        HALF=triton.next_power_of_2(size // 2), num_warps=4,
        enable_fp_fusion=False,  # a fused multiply-add would skip a rounding that plain code makes
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        cos = cos.contiguous()
        sin = sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotated(_dense(query), _dense(key), cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        # Turned back: each half is multiplied with the sines of the other, with the sign changed.
        back = -sin.roll(sin.shape[-1] // 2, -1)
        return *_rotated(_dense(grad_query), _dense(grad_key), cos, back), None, None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """x · cos + rotate_half(x) · sin for queries and keys [B, heads, T, D] with angles [B or 1, T, D], in one
    go."""
    found: tuple[Tensor, Tensor] = _Rotary.apply(query, key, cos, sin)
    return found


# --- gated activation ---------------------------------------------------------------------------------------


@triton.jit
def _gate(gate, up, out, width, gate_row, up_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(gate + row * gate_row + at, mask=inside, other=0.0)
    factor = tl.load(up + row * up_row + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, gated(x, factor, out.dtype.element_ty), mask=inside)


@triton.jit
def gated(x, factor, kind: tl.constexpr):
    """silu(x) · factor in the dtype `kind`."""
    wide = x.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(kind).to(tl.float32)
    return (silu * factor.to(tl.float32)).to(kind)


@triton.jit
def _gate_back(
    grad, gate, up, grad_gate, grad_up, width, above_row, gate_row, up_row, out_row, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(grad + row * above_row + at, mask=inside, other=0.0).to(tl.float32)
    kind = grad_gate.dtype.element_ty
    open_share = 1 / (1 + tl.exp(-x))
    target = row * out_row + at
    tl.store(grad_up + target, (above * (x * open_share).to(kind).to(tl.float32)).to(kind), mask=inside)
    slope = open_share * (1 + x * (1 - open_share))
    tl.store(grad_gate + target, ((above * factor).to(kind).to(tl.float32) * slope).to(kind), mask=inside)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates = _rows(gate)
    ups = _rows(up)
    rows, width = gates.shape
    _gate[(rows, triton.cdiv(width, 1024))](
        gates, ups, out, width, gates.stride(0), ups.stride(0), BLOCK=1024, num_warps=4
    )
    return out


def _gated_back(grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    """Writes the gradients, whose rows are equally far apart."""
    above, gates, ups = (_rows(part) for part in (grad, gate, up))
    rows, width = gates.shape
    _gate_back[(rows, triton.cdiv(width, 1024))](
        above, gates, ups, grad_gate, grad_up, width, above.stride(0), gates.stride(0), ups.stride(0),
        grad_gate.stride(-2), BLOCK=1024, num_warps=4,
    )  # fmt: skip


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        _gated_back(grad, gate, up, grad_gate, grad_up)
        return grad_gate, grad_up


class _GatedSiluHalves(torch.autograd.Function):
    """Both halves are views of one tensor, and so are their gradients: nothing is copied together."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return _gated(*both.chunk(2, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (both,) = ctx.saved_tensors
        slopes = torch.empty(both.shape, dtype=both.dtype, device=both.device)
        _gated_back(grad, *both.chunk(2, -1), *slopes.chunk(2, -1))
        return slopes


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    result: Tensor = _GatedSilu.apply(gate, up)
    return result


def gated_silu_halves(both: Tensor) -> Tensor:
    """silu(gate) · up of [..., gate and up]."""
    result: Tensor = _GatedSiluHalves.apply(both)
    return result


# --- sums of partial products -------------------------------------------------------------------------------


@triton.jit
def _add_in_order(stream, parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(stream + at, mask=inside)
    for part in tl.static_range(PARTS):
        total = total + tl.load(parts + part * count + at, mask=inside)
    tl.store(out + at, total, mask=inside)


def add_in_order(stream: Tensor, parts: Tensor, *, in_place: bool = False) -> Tensor:
    """stream + parts[0] + parts[1] ..., from the left, in float32; `parts` [n, *stream.shape]. Both are
    contiguous."""
    out = stream if in_place else torch.empty_like(stream)
    count = stream.numel()
    _add_in_order[(triton.cdiv(count, 1024),)](
        stream, parts, out, count, PARTS=len(parts), BLOCK=1024, num_warps=4
    )
    return out
