"""Causal attention over packed sequences, written so that sampling can repeat its numbers to the last bit.

In 16 bits one rounding that falls differently grows over the layers of a model. So a policy's log-probs in
training are those it was sampled with only where every part of both passes rounds the same sums in the same
order. Matrix products do: what they give for a row does not depend on the other rows. Attention does if keys
are taken in the same blocks, counted from the beginning of the sequence, one after the other, with the same
arithmetic. `absorb` is that arithmetic; the decode kernel of the rollout engine (rollout/native/kernels.py)
is built from it and its parts. Every SEGMENT keys are summed for themselves and `joined` in order, so that
different programs may compute the segments of one long sequence. The backward pass is torch's own.

This file needs Triton and is imported only where a GPU is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 64
"""Keys that are taken at a time."""
SEGMENT = 1024
"""Keys that are summed for themselves, a multiple of BLOCK."""
LARGEST = 128
"""Size of a head up to which the kernel keeps its sums in registers."""
LOG2E = 1.4426950408889634
"""Powers are of two, so scores are multiplied with this besides their scale."""
_QUERIES = 64


@triton.jit
def weigh(scores, top, total, scale):
    """The part of `absorb` before the values. Also returns the weights of the keys of this block, and the
    factor of the sums so far."""
    higher = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet keeps zeros.
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(tl.fma(scores, scale, -(safe * scale)[:, None]))
    fade = tl.exp2((top - safe) * scale)
    total = tl.fma(total, fade, tl.sum(p, 1))
    return higher, total, p, fade


@triton.jit
def absorb(scores, v, top, total, mixed, scale, powers=None):
    """Take one block of keys into the running softmax of each row: `top` is its largest score so far, `total`
    the sum of exp2((score - top) · scale), `mixed` that sum weighted with the values. Hidden keys have a
    score of -inf. The values are times `powers`, if there are any."""
    top, total, p, fade = weigh(scores, top, total, scale)
    mixed = mix(p, v, mixed * fade[:, None], powers)
    return top, total, mixed


@triton.jit
def mix(p, v, mixed, powers=None):
    """Add values with the weights p to `mixed`."""
    if powers is not None:
        if v.dtype == tl.float16:  # small weights would lose digits in its range
            v *= powers.to(v.dtype)[:, None]
        else:
            p *= powers[None, :]
    return tl.dot(p.to(v.dtype), v, mixed, input_precision="ieee")


@triton.jit
def joined(top, total, mixed, next_top, next_total, next_mixed, scale):
    """The running softmax of the keys so far and that of the next segment, as one. A segment that a row does
    not see changes nothing."""
    higher = tl.maximum(top, next_top)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2((top - safe) * scale)
    share = tl.exp2((next_top - safe) * scale)
    total = tl.fma(total, fade, next_total * share)
    mixed = tl.fma(mixed, tl.broadcast_to(fade[:, None], mixed.shape), next_mixed * share[:, None])
    return higher, total, mixed


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127), by which 8-bit numbers of a cache are multiplied.

    A product with a power of two changes no digit. So scores are multiplied in place of keys, and in bf16 the
    weights of values in place of values, with the same bits and fewer products.
    """
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _segment(
    q, keys, values, row, length, window, scale, table, key_page, value_page, key_token, value_token,
    key_exponents, value_exponents, exponents_page,
    first, border, end, size: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """The running softmax over the keys from `first` to `end`. All queries come after those before `border`.
    With pages of PAGE keys, `table` says where they are. SHORT: they have 8 bits, and exponents."""
    d = tl.arange(0, SIZE)
    real = d < size
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, SIZE], tl.float32)
    for block in range(first, tl.minimum(border, end), BLOCK):
        place = block + tl.arange(0, BLOCK)
        k_from = keys
        v_from = values
        if PAGE:  # where the sequence would begin if all of it was like this page
            page = tl.load(table + block // PAGE).to(tl.int64)
            k_from += page * key_page - block // PAGE * PAGE * key_token
            v_from += page * value_page - block // PAGE * PAGE * value_token
        k = tl.load(k_from + place[None, :] * key_token + d[:, None], mask=real[:, None], other=0.0)
        v_powers = None
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if SHORT:
            exponents = page * exponents_page + place % PAGE
            scores *= power_of_two(tl.load(key_exponents + exponents))[None, :]
            v_powers = power_of_two(tl.load(value_exponents + exponents))
        if WINDOW:
            scores = tl.where(row[:, None] - place[None, :] < window, scores, float("-inf"))
        v = tl.load(v_from + place[:, None] * value_token + d[None, :], mask=real[None, :], other=0.0)
        top, total, mixed = absorb(scores, v.to(q.dtype), top, total, mixed, scale, v_powers)
    for block in range(tl.maximum(first, border), end, BLOCK):
        place = block + tl.arange(0, BLOCK)
        there = place < length
        k_from = keys
        v_from = values
        if PAGE:  # where the sequence would begin if all of it was like this page
            page = tl.load(table + block // PAGE).to(tl.int64)
            k_from += page * key_page - block // PAGE * PAGE * key_token
            v_from += page * value_page - block // PAGE * PAGE * value_token
        k = tl.load(
            k_from + place[None, :] * key_token + d[:, None], mask=there[None, :] & real[:, None], other=0.0
        )
        v_powers = None
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if SHORT:
            exponents = page * exponents_page + place % PAGE
            scores *= power_of_two(tl.load(key_exponents + exponents, mask=there, other=0))[None, :]
            v_powers = power_of_two(tl.load(value_exponents + exponents, mask=there, other=0))
        seen = place[None, :] <= row[:, None]
        if WINDOW:
            seen &= row[:, None] - place[None, :] < window
        scores = tl.where(seen, scores, float("-inf"))
        v = tl.load(
            v_from + place[:, None] * value_token + d[None, :], mask=there[:, None] & real[None, :], other=0.0
        )
        top, total, mixed = absorb(scores, v.to(q.dtype), top, total, mixed, scale, v_powers)
    return top, total, mixed


@triton.jit
def _attend(
    query, key, value, out, normal, bounds, origins, tables, tokens, window, scale,
    query_token, query_head, key_page, key_token, key_head, value_page, value_token, value_head, table_row,
    key_exponents, value_exponents, exponents_page, exponents_head,
    group: tl.constexpr, size: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    # The last queries see most keys: they go first, so that the work ends evenly.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(bounds + sequence).to(tl.int64)
    count = (tl.load(bounds + sequence + 1) - begin).to(tl.int32)
    if start < count:
        at = begin + start + tl.arange(0, QUERIES)
        d = tl.arange(0, SIZE)
        keys = key + (head // group) * key_head
        values = value + (head // group) * value_head
        key_exponents += (head // group) * exponents_head
        value_exponents += (head // group) * exponents_head
        table = tables
        if PAGE:
            origin = tl.load(origins + sequence).to(tl.int32)
            table += sequence.to(tl.int64) * table_row
        else:
            origin = 0
            keys += begin * key_token
            values += begin * value_token
        length = origin + count
        start += origin
        row = start + tl.arange(0, QUERIES)
        inside = row < length
        real = d < size
        asked = query + at[:, None] * query_token + head * query_head + d[None, :]
        q = tl.load(asked, mask=inside[:, None] & real[None, :], other=0.0)
        first = 0
        if WINDOW:
            first = tl.maximum(0, start - window + 1) // BLOCK * BLOCK
        border = start // BLOCK * BLOCK
        end = tl.minimum(start + QUERIES, length)
        if SEGMENT:
            top = tl.full([QUERIES], float("-inf"), tl.float32)
            total = tl.zeros([QUERIES], tl.float32)
            mixed = tl.zeros([QUERIES, SIZE], tl.float32)
            for segment in range(first // SEGMENT * SEGMENT, end, SEGMENT):
                next_top, next_total, next_mixed = _segment(
                    q, keys, values, row, length, window, scale, table, key_page, value_page, key_token,
                    value_token, key_exponents, value_exponents, exponents_page,
                    tl.maximum(first, segment), border, tl.minimum(end, segment + SEGMENT),
                    size, SIZE, QUERIES, BLOCK, PAGE, WINDOW, SHORT,
                )  # fmt: skip
                top, total, mixed = joined(top, total, mixed, next_top, next_total, next_mixed, scale)
        else:
            top, total, mixed = _segment(
                q, keys, values, row, length, window, scale, table, key_page, value_page, key_token,
                value_token, key_exponents, value_exponents, exponents_page,
                first, border, end, size, SIZE, QUERIES, BLOCK, PAGE, WINDOW, SHORT,
            )  # fmt: skip
        mixed = mixed / total[:, None]
        target = out + (at[:, None] * tl.num_programs(1) + head) * size + d[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])
        tl.store(
            normal + head.to(tl.int64) * tokens + at,
            (top * scale + tl.log2(total)) * 0.6931471805599453,
            mask=inside,
        )


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    going_on: tuple[Tensor, Tensor] | None = None,
    exponents: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """What every token says, and the logarithm of the sum of its weights [heads, N]."""
    tokens, heads, size = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    normal = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    if going_on is None:  # [N, key heads, D]
        origins = tables = bounds
        page = table_row = 0
        most = longest
        strides = [(0, x.stride(0), x.stride(1)) for x in (k, v)]
    else:  # pages of [pages, key heads, positions, D]
        origins, tables = going_on
        page = k.shape[2]
        table_row = tables.stride(0)
        most = tables.shape[1] * page
        strides = [(x.stride(0), x.stride(2), x.stride(1)) for x in (k, v)]
    key_exponents, value_exponents = exponents or (bounds, bounds)
    _attend[(triton.cdiv(longest, _QUERIES), heads, len(bounds) - 1)](
        q, k, v, out, normal, bounds, origins, tables, tokens, window or 0, LOG2E * scale,
        q.stride(0), q.stride(1), *strides[0], *strides[1], table_row,
        key_exponents, value_exponents, *(exponents[0].stride()[:2] if exponents else (0, 0)),
        heads // k.shape[1], size, SIZE=max(16, triton.next_power_of_2(size)), QUERIES=_QUERIES, BLOCK=BLOCK,
        SEGMENT=SEGMENT if most > SEGMENT else 0, PAGE=page, WINDOW=window is not None,
        SHORT=exponents is not None,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, normal


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        longest: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out, normal = _launch(q, k, v, bounds, longest, scale, window)
        ctx.save_for_backward(q, k, v, out, normal, bounds)
        ctx.longest = longest
        ctx.scale = scale
        ctx.window = window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> Any:
        q, k, v, out, normal, bounds = ctx.saved_tensors
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        left = -1 if ctx.window is None else ctx.window - 1
        gradients = torch.ops.aten._flash_attention_backward(
            above.contiguous(), q, k, v, out, normal, bounds, bounds, ctx.longest, ctx.longest,
            0.0, False, state, unused,
            scale=ctx.scale, window_size_left=left, window_size_right=0,
        )  # fmt: skip
        return *gradients, None, None, None, None


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Each token of q [N, heads, D] attends to itself and those before it in its sequence; k and v [N, key
    heads, D].

    `bounds` [sequences + 1] int32: where the sequences begin and end, none longer than `longest`. With a
    window W a token sees itself and the W - 1 before it.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # as the backward pass wants them
    result: Tensor = _Attention.apply(
        q, k, v, bounds, longest, q.shape[-1] ** -0.5 if scale is None else scale, window
    )
    return result


def continued_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bounds: Tensor,
    longest: int,
    origins: Tensor,
    tables: Tensor,
    exponents: tuple[Tensor, Tensor] | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The same for pieces of sequences whose keys and values lie in pages of a cache [pages, key heads,
    positions, D]: piece i of q goes on at position `origins[i]` of the sequence in the pages `tables[i]`
    [pieces, pages]. A page is a multiple of BLOCK, or the whole sequence is in one. Keys and values of 8 bits
    have `exponents` [pages, key heads, positions, 1]. Without gradients."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _launch(q, keys, values, bounds, longest, scale, window, (origins, tables), exponents)[0]
