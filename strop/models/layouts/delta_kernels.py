"""A decode step of the gated delta rule in three Triton kernels: the short convolution, the update of the
state, and the gated norm of the result.

A step is bound by reading and writing the states. Plain torch passes over them about twelve times; here each
is read once and written once, in place. Results round where the modules of transformers round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 256
"""Channels of the convolution for each program."""
_VALUES = 32
"""Columns of a state for each program: several programs per multiprocessor hide the wait for memory."""


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _convolve(
    x, weight, state, out, running, channels, stride,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    written = inside
    if SOME:
        written = inside & (tl.load(running + row) != 0)
    own = state + (row * channels + channel) * TAPS
    kind = out.dtype.element_ty
    new = tl.load(x + row * stride + channel, mask=inside, other=0.0)
    factor = tl.load(weight + channel * TAPS + TAPS - 1, mask=inside, other=0.0)
    total = new.to(tl.float32) * factor.to(tl.float32)
    for tap in tl.static_range(1, TAPS):
        old = tl.load(own + tap, mask=inside, other=0.0)
        factor = tl.load(weight + channel * TAPS + tap - 1, mask=inside, other=0.0)
        total += old.to(tl.float32) * factor.to(tl.float32)
        tl.store(own + tap - 1, old, mask=written)
    tl.store(own + TAPS - 1, new, mask=written)
    narrow = total.to(kind).to(tl.float32)
    tl.store(out + row * channels + channel, _silu(narrow).to(kind), mask=inside)


def convolve_step(x: Tensor, weight: Tensor, state: Tensor, running: Tensor | None = None) -> Tensor:
    """SiLU of the causal convolution at the next token. `x` [rows, channels]; `weight` [channels, taps];
    `state` [rows, channels, taps], the last inputs, which move on by one; only in rows that are `running`."""
    rows, channels = x.shape
    assert state.is_contiguous() and weight.is_contiguous() and x.stride(1) == 1
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    grid = (rows, triton.cdiv(channels, _CHANNELS))
    _convolve[grid](
        x, weight, state, out, running, channels, x.stride(0),
        TAPS=weight.shape[1], BLOCK=_CHANNELS, SOME=running is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _delta(
    mixed, a, b, log_decay, bias, state, out, running, heads, group, key_size, value_size, width, scale, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) // heads
    head = tl.program_id(0).to(tl.int64) % heads
    i = tl.arange(0, KEYS)
    j = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    is_key = i < key_size
    is_value = j < value_size
    both = is_key[:, None] & is_value[None, :]
    at = state + ((row * heads + head) * key_size + i[:, None]) * value_size + j[None, :]
    s = tl.load(at, mask=both, other=0.0).to(tl.float32)
    key_width = heads // group * key_size
    source = mixed + row * width
    q = tl.load(source + head // group * key_size + i, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(source + key_width + head // group * key_size + i, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(source + 2 * key_width + head * value_size + j, mask=is_value, other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + eps) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + eps)
    x = tl.load(a + row * heads + head).to(tl.float32) + tl.load(bias + head).to(tl.float32)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    decay = tl.exp(-tl.exp(tl.load(log_decay + head).to(tl.float32)) * softplus)
    rate = tl.load(b + row * heads + head)
    beta = (1.0 / (1.0 + tl.exp(-rate.to(tl.float32)))).to(rate.dtype).to(tl.float32)
    s = s * decay
    delta = (v - tl.sum(s * k[:, None], 0)) * beta
    s = s + k[:, None] * delta[None, :]
    written = both
    if SOME:
        written = both & (tl.load(running + row) != 0)
    tl.store(at, s.to(state.dtype.element_ty), mask=written)
    found = tl.sum(s * q[:, None], 0)
    tl.store(out + (row * heads + head) * value_size + j, found.to(out.dtype.element_ty), mask=is_value)


def delta_step(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    bias: Tensor,
    state: Tensor,
    running: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The gated delta rule at the next token: [rows, heads, value size]. `mixed` [rows, queries, keys and
    values]; `a` and `b` [rows, heads] give decay and rate; `state` [rows, heads, key size, value size] is
    updated in rows that are `running`, or in all."""
    rows, heads, key_size, value_size = state.shape
    width = mixed.shape[1]
    key_heads = (width - heads * value_size) // (2 * key_size)
    assert state.is_contiguous() and mixed.is_contiguous() and a.is_contiguous() and b.is_contiguous()
    out = torch.empty(rows, heads, value_size, dtype=mixed.dtype, device=mixed.device)
    _delta[(rows * heads, triton.cdiv(value_size, _VALUES))](
        mixed, a, b, log_decay, bias, state, out, running, heads, heads // key_heads, key_size, value_size,
        width, key_size**-0.5, eps, KEYS=triton.next_power_of_2(key_size), VALUES=_VALUES,
        SOME=running is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _gate(x, gate, weight, out, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    kind = x.dtype.element_ty
    values = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    normal = (values * tl.rsqrt(tl.sum(values * values, 0) / size + eps)).to(kind).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scaled = (factor * normal).to(kind).to(tl.float32)
    opened = _silu(tl.load(gate + row * size + column, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + row * size + column, (scaled * opened).to(kind), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) · SiLU(gate) over the last axis."""
    size = x.shape[-1]
    assert x.is_contiguous() and gate.is_contiguous()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _gate[(x.numel() // size,)](x, gate, weight, out, size, eps, BLOCK=block, num_warps=1)
    return out
