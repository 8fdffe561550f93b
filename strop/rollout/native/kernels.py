"""Triton kernels for the parts of a decode step that plain torch computes with dozens of small kernels.

A decode step of a small model is bound by the number of kernels, not by their work. Where plain torch rounds
to the dtype of the model, so do these, so that they agree with the training pass. Kernels that training also
uses are in models/kernels.py. This file needs Triton and is imported only on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strop.models.flash import BLOCK, LARGEST, LOG2E, SEGMENT, absorb, joined, mix, power_of_two, weigh
from strop.rollout.native.draw_kernels import draw
from strop.rollout.native.quantization.cache_kernels import widened, widened_pairs
from strop.rollout.native.quantization.kernels import shortened

__all__ = ["copy_pages", "decode_attention", "draw", "padded_length"]


# --- attention ----------------------------------------------------------------------------------------------


@triton.jit
def _decode(
    query, key, value, keys, values, positions, table, sinks, out, partial, weight,
    power, scale, softcap, window,
    query_row, query_head, key_row, key_head, value_row, value_head,
    keys_page, keys_head, values_page, values_head, table_row,
    key_exponents, value_exponents, exponents_page, exponents_head,
    heads: tl.constexpr, group: tl.constexpr, key_size: tl.constexpr, value_size: tl.constexpr,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """One segment of one row, for the query heads of one key head. SHORT: the cache has 8 bits."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    segment = tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    first = 0
    if WINDOW:
        first = tl.maximum(0, position - window + 1) // BLOCK * BLOCK
    border = position // BLOCK * BLOCK
    start = first
    end = border + BLOCK
    if SEGMENTS > 1:
        start = tl.maximum(first, segment * SEGMENT)
        end = tl.minimum(end, segment * SEGMENT + SEGMENT)
    if start < end:
        i = tl.arange(0, GROUP)
        dk = tl.arange(0, KEY)
        dv = tl.arange(0, VALUE)
        member = i < group
        in_key = dk < key_size
        in_value = dv < value_size
        q = tl.load(
            query + row * query_row + (head * group + i[:, None]) * query_head + dk[None, :],
            mask=member[:, None] & in_key[None, :], other=0.0,
        )  # fmt: skip
        k_cache = keys + head * keys_head
        v_cache = values + head * values_head
        k_exponents = key_exponents + head * exponents_head
        v_exponents = value_exponents + head * exponents_head
        pages = table + row * table_row
        top = tl.full([GROUP], float("-inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        mixed = tl.zeros([GROUP, VALUE], tl.float32)
        if SHORT:  # the values are taken in pairs, in halves of `mixed`
            pair = tl.arange(0, VALUE // 2)
            even = tl.zeros([GROUP, VALUE // 2], tl.float32)
            odd = tl.zeros([GROUP, VALUE // 2], tl.float32)
        if SINKS:  # noqa: SIM102 - the first is known when the kernel is compiled
            if start == first:
                sink = tl.load(sinks + head * group + i, mask=member, other=float("-inf")).to(tl.float32)
                top = sink * 1.4426950408889634 / power
                total += 1.0
        if border < end:
            k_new = tl.load(key + row * key_row + head * key_head + dk, mask=in_key, other=0.0)
            v_new = tl.load(value + row * value_row + head * value_head + dv, mask=in_value, other=0.0)
            last = tl.load(pages + position // PAGE).to(tl.int64)
            if SHORT:
                k_new, k_exponent = shortened(k_new)
                v_new, v_exponent = shortened(v_new)
                tl.store(k_exponents + last * exponents_page + position % PAGE, k_exponent)
                tl.store(v_exponents + last * exponents_page + position % PAGE, v_exponent)
            tl.store(k_cache + last * keys_page + position % PAGE * key_size + dk, k_new, mask=in_key)
            tl.store(v_cache + last * values_page + position % PAGE * value_size + dv, v_new, mask=in_value)
            tl.debug_barrier()  # only this program reads them back
        # The number of a page is loaded one iteration before the page, and so are exponents.
        page = tl.load(pages + start // PAGE)
        if SHORT:
            exponents = page.to(tl.int64) * exponents_page + start % PAGE
            of_keys = _exponents(k_exponents + exponents, start, position, BLOCK)
            of_values = _exponents(v_exponents + exponents, start, position, BLOCK)
        for at in range(start, end, BLOCK):
            next_page = tl.load(pages + tl.minimum(at + BLOCK, border) // PAGE)
            in_block = tl.arange(0, BLOCK)
            place = at + in_block
            there = place <= position
            seen = there
            if WINDOW:
                seen &= position - place < window
            if SHORT:
                k_from = k_cache + page.to(tl.int64) * keys_page + at % PAGE * key_size
                v_from = v_cache + page.to(tl.int64) * values_page + at % PAGE * value_size
                # All that is in a page is finite, so a whole one needs no mask.
                whole: tl.constexpr = PAGE % BLOCK == 0
                k_at = k_from + dk[:, None] + in_block[None, :] * key_size
                k = _numbers(k_at, there[None, :] & in_key[:, None], whole and key_size == KEY)
                k_powers = power_of_two(of_keys)
                scores = _scored(q, widened(k, q.dtype), k_powers, scale, softcap, SOFTCAP)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                top, total, p, fade = weigh(scores, top, total, power)
                v_at = (
                    v_from.to(tl.pointer_type(tl.int16))
                    + pair[None, :]
                    + in_block[:, None] * (value_size // 2)
                )
                v_there = there[:, None] & (pair < value_size // 2)[None, :]
                v = _numbers(v_at, v_there, whole and value_size == VALUE)
                v_powers = power_of_two(of_values)
                v_even, v_odd = widened_pairs(v, q.dtype)
                even = mix(p, v_even, even * fade[:, None], v_powers)
                odd = mix(p, v_odd, odd * fade[:, None], v_powers)
                exponents = next_page.to(tl.int64) * exponents_page + (at + BLOCK) % PAGE
                of_keys = _exponents(k_exponents + exponents, at + BLOCK, position, BLOCK)
                of_values = _exponents(v_exponents + exponents, at + BLOCK, position, BLOCK)
            else:
                # Where the row would begin if all of it was like this page: takes fewer registers.
                k_from = k_cache + page.to(tl.int64) * keys_page - at // PAGE * (PAGE * key_size)
                v_from = v_cache + page.to(tl.int64) * values_page - at // PAGE * (PAGE * value_size)
                k_at = k_from + place[None, :] * key_size + dk[:, None]
                k = tl.load(k_at, mask=there[None, :] & in_key[:, None], other=0.0)
                scores = _scored(q, k.to(q.dtype), None, scale, softcap, SOFTCAP)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                v_at = v_from + place[:, None] * value_size + dv[None, :]
                v = tl.load(v_at, mask=there[:, None] & in_value[None, :], other=0.0)
                top, total, mixed = absorb(scores, v.to(q.dtype), top, total, mixed, power)
            page = next_page
        if SHORT:
            mixed = tl.join(even, odd).reshape(GROUP, VALUE)
        lane = (row * heads + head) * group + i
        if (start == first) & (border < end):  # the row has no other segment
            tl.store(
                out + lane[:, None] * value_size + dv[None, :],
                (mixed / total[:, None]).to(out.dtype.element_ty),
                mask=member[:, None] & in_value[None, :],
            )
        elif SEGMENTS > 1:
            slot = lane * SEGMENTS + segment
            tl.store(partial + slot[:, None] * VALUE + dv[None, :], mixed, mask=member[:, None])
            tl.store(weight + slot * 2, top, mask=member)
            tl.store(weight + slot * 2 + 1, total, mask=member)


@triton.jit
def _exponents(exponents, at, position, BLOCK: tl.constexpr):
    """Those of the block of keys at `at`; 0 after `position`."""
    i = tl.arange(0, BLOCK)
    return tl.load(exponents + i, mask=at + i <= position, other=0)


@triton.jit
def _numbers(at, there, all_there: tl.constexpr):
    if all_there:
        return tl.load(at)
    else:
        return tl.load(at, mask=there, other=0.0)


@triton.jit
def _scored(q, k, powers, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores of keys that are times `powers`, if there are any."""
    scores = tl.dot(q, k, input_precision="ieee")
    if powers is not None:
        scores *= powers[None, :]
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends
        scores = softcap * (1 - 2 / (tl.exp(2 * scores * scale / softcap) + 1))
    return scores


@triton.jit
def _join(
    partial, weight, positions, out, power, window,
    query_heads: tl.constexpr, value_size: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Join the segments of one query head of one row, in the order of the training kernel."""
    lane = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + lane // query_heads).to(tl.int32)
    first = 0
    if WINDOW:
        first = tl.maximum(0, position - window + 1) // BLOCK * BLOCK // SEGMENT
    last = position // SEGMENT
    if first < last:
        one = tl.arange(0, 1)
        dv = tl.arange(0, VALUE)
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        mixed = tl.zeros([1, VALUE], tl.float32)
        for segment in tl.static_range(SEGMENTS):
            there = (segment >= first) & (segment <= last)
            slot = lane * SEGMENTS + segment + one
            next_top = tl.load(weight + slot * 2, mask=there, other=float("-inf"))
            next_total = tl.load(weight + slot * 2 + 1, mask=there, other=0.0)
            next_mixed = tl.load(partial + slot[:, None] * VALUE + dv[None, :], mask=there, other=0.0)
            top, total, mixed = joined(top, total, mixed, next_top, next_total, next_mixed, power)
        tl.store(
            out + (lane + one)[:, None] * value_size + dv[None, :],
            (mixed / total[:, None]).to(out.dtype.element_ty),
            mask=(dv < value_size)[None, :],
        )


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor,
    longest: int,
    *,
    exponents: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per row; also stores its key and value in the cache.

    `query` [rows, heads, 1, D], `key` and `value` [rows, key heads, 1, D]; `keys` and `values` [pages, key
    heads, positions, D] hold the tokens before `positions` [rows], those of a row in the pages `table` [rows,
    pages]. A page is a multiple of flash.BLOCK, or the whole row is in one. No position is `longest` or more.
    Keys and values of 8 bits have `exponents` [pages, key heads, positions, 1] (quantization/cache.py), and
    an even size.
    Returns [rows, 1, heads, D]. Segments are computed by different programs and joined as in training.
    """
    rows, query_heads, _, key_size = query.shape
    heads = key.shape[1]
    value_size = value.shape[3]
    group = query_heads // heads
    if scale is None:
        scale = key_size**-0.5
    power = LOG2E if softcap else LOG2E * scale
    out = query.new_empty(rows, 1, query_heads, value_size)
    segments = padded_length(longest) // SEGMENT
    lanes = max(16, triton.next_power_of_2(group))
    padded = triton.next_power_of_2(value_size)
    block, warps, stages = _shape(
        lanes,
        max(key_size, value_size),
        key.dtype,
        few=rows * heads * segments <= _FEW_PROGRAMS,
        short=exponents is not None,
    )
    parts = segments if segments > 1 else 0
    partial = torch.empty(rows * query_heads, parts, padded, dtype=torch.float32, device=query.device)
    weight = torch.empty(rows * query_heads, parts, 2, dtype=torch.float32, device=query.device)
    key_exponents, value_exponents = exponents or (table, table)
    _decode[(rows, heads, segments)](
        query, key, value, keys, values, positions, table,
        query if sinks is None else sinks, out, partial, weight, power, scale, softcap or 0.0, window or 0,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), table.stride(0),
        key_exponents, value_exponents, *(exponents[0].stride()[:2] if exponents else (0, 0)),
        heads, group, key_size, value_size,
        GROUP=lanes, KEY=max(16, triton.next_power_of_2(key_size)), VALUE=padded, BLOCK=block,
        PAGE=keys.shape[2], SEGMENT=SEGMENT, SEGMENTS=segments, WINDOW=window is not None,
        SOFTCAP=softcap is not None, SINKS=sinks is not None, SHORT=exponents is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if segments > 1:
        _join[(rows * query_heads,)](
            partial, weight, positions, out, power, window or 0,
            query_heads, value_size, VALUE=padded, BLOCK=block, SEGMENT=SEGMENT, SEGMENTS=segments,
            WINDOW=window is not None, num_warps=1,
        )  # fmt: skip
    return out


def padded_length(longest: int) -> int:
    """The least length that `decode_attention` computes in the same way for rows of up to `longest`."""
    return int(SEGMENT * triton.next_power_of_2(triton.cdiv(longest, SEGMENT)))


_FEW_PROGRAMS = 384
"""With up to three programs per multiprocessor of an H200, there is memory for a third stage: 34 instead of
41 microseconds for 8 rows of 6,000 tokens at 1.5B. With more, they wait for memory: 81 instead of 67 for 64
rows of 4,000."""


def _shape(lanes: int, size: int, dtype: torch.dtype, *, few: bool, short: bool) -> tuple[int, int, int]:
    """Positions per iteration, warps, and stages of the loop. One warp sums a row in the order of the
    training kernel, and many small programs hide each other's latency, or a further stage where there are
    few; a warp needs registers for its queries, `lanes` of `size` numbers. A `short` cache of 8 bits needs no
    third stage."""
    if size > LARGEST:
        return 32, 4, 3
    if dtype.itemsize == 2 and lanes * size <= 2048:
        stages = 3 if (few or size <= 64) and not short else 2
        return BLOCK, 1, stages
    return BLOCK, 4, 3


# --- copies of pages ----------------------------------------------------------------------------------------


@triton.jit
def _copy(
    addresses, sources, targets, count, stride, KIND: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    pair = tl.program_id(0)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tensor = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(KIND))
    source = tl.multiple_of(tensor + tl.load(sources + pair).to(tl.int64) * stride, ALIGNED)
    target = tl.multiple_of(tensor + tl.load(targets + pair).to(tl.int64) * stride, ALIGNED)
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


_KINDS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


def copy_pages(example: Tensor, addresses: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy source pages to target pages in every tensor of `addresses`; all of them have the shape of
    `example` [pages, heads, positions, D]. No target is a source."""
    count = example[0].numel()
    itemsize = example.element_size()
    # If every page begins at a multiple of 16 bytes, 16 bytes are copied at once.
    aligned = 16 if count * itemsize % 16 == 0 else itemsize
    _copy[(len(sources), len(addresses), triton.cdiv(count, 4096))](
        addresses, sources, targets, count, example.stride(0),
        KIND=_KINDS[itemsize], BLOCK=4096, ALIGNED=aligned,
    )  # fmt: skip
