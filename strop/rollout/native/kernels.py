"""The parts of a decode step that plain torch spreads over dozens of small kernels, as one Triton kernel each.

A decode step of a small model is bound by the number of kernels, not by what they compute. Here are: attention of one new
token per row over the used part of its cache row (which also stores the new key and value), and the draw of a token with its
log-prob and the bookkeeping of the row. Where plain torch rounds to the dtype of the model, so do these, so that they agree
with the training pass. The pieces that training has too are in models/kernels.py.

This file needs Triton and is imported only where a GPU is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strop.models.flash import BLOCK, LARGEST, LOG2E, absorb

_DRAW_BLOCK = 4096
_RUNNING, _STOP, _LENGTH, _ERROR = (tl.constexpr(state) for state in range(4))


# --- attention -----------------------------------------------------------------------------------------------------------


@triton.jit
def _decode(
    query, key, value, keys, values, positions, lenders, borrowed, sinks, out, partial, weight,
    power, scale, softcap, window,
    query_row, query_head, key_row, key_head, value_row, value_head,
    keys_row, keys_head, values_row, values_head,
    heads: tl.constexpr, group: tl.constexpr, key_size: tl.constexpr, value_size: tl.constexpr,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    held, away = 0, row * 0
    if LENT:
        held = tl.load(borrowed + row).to(tl.int32)
        away = tl.load(lenders + row) - row
    i = tl.arange(0, GROUP)
    dk = tl.arange(0, KEY)
    dv = tl.arange(0, VALUE)
    member = i < group
    in_key, in_value = dk < key_size, dv < value_size
    q = tl.load(
        query + row * query_row + (head * group + i[:, None]) * query_head + dk[None, :],
        mask=member[:, None] & in_key[None, :], other=0.0,
    )  # fmt: skip
    k_cache = keys + row * keys_row + head * keys_head
    v_cache = values + row * values_row + head * values_head
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    mixed = tl.zeros([GROUP, VALUE], tl.float32)
    if SINKS:  # noqa: SIM102 - the first is known when the kernel is compiled
        if split == 0:
            sink = tl.load(sinks + head * group + i, mask=member, other=float("-inf")).to(tl.float32)
            top = sink * 1.4426950408889634 / power
            total += 1.0
    first = 0
    if WINDOW:
        first = tl.maximum(0, position - window + 1) // BLOCK * BLOCK
    border = position // BLOCK * BLOCK
    span = tl.cdiv((border - first) // BLOCK + 1, SPLITS) * BLOCK
    start = first + split * span
    if (start <= border) & (border < start + span):
        k_new = tl.load(key + row * key_row + head * key_head + dk, mask=in_key, other=0.0)
        v_new = tl.load(value + row * value_row + head * value_head + dv, mask=in_value, other=0.0)
        tl.store(k_cache + position * key_size + dk, k_new, mask=in_key)
        tl.store(v_cache + position * value_size + dv, v_new, mask=in_value)
        tl.debug_barrier()  # this program reads them back, and no other one does
    for at in range(start, tl.minimum(start + span, border + BLOCK), BLOCK):
        place = at + tl.arange(0, BLOCK)
        there = place <= position
        # Rows that read the same beginning at the same place find it in the processor's own memory.
        far = tl.where(at + BLOCK <= held, away, 0)
        k_from, v_from = k_cache + far * keys_row, v_cache + far * values_row
        k = tl.load(k_from + place[None, :] * key_size + dk[:, None], mask=there[None, :] & in_key[:, None], other=0.0)
        seen = there
        if WINDOW:
            seen &= position - place < window
        scores = tl.where(seen[None, :], _scored(q, k, scale, softcap, SOFTCAP), float("-inf"))
        v = tl.load(v_from + place[:, None] * value_size + dv[None, :], mask=there[:, None] & in_value[None, :], other=0.0)
        top, total, mixed = absorb(scores, v, top, total, mixed, power)
    lane = (row * heads + head) * group + i
    if SPLITS == 1:
        mixed = mixed / total[:, None]
        tl.store(
            out + lane[:, None] * value_size + dv[None, :], mixed.to(out.dtype.element_ty),
            mask=member[:, None] & in_value[None, :],
        )  # fmt: skip
    else:
        slot = lane * SPLITS + split
        tl.store(partial + slot[:, None] * VALUE + dv[None, :], mixed, mask=member[:, None])
        tl.store(weight + slot * 2, top * power, mask=member)
        tl.store(weight + slot * 2 + 1, total, mask=member)


@triton.jit
def _scored(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    scores = tl.dot(q, k, input_precision="ieee")
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends
        scores = softcap * (1 - 2 / (tl.exp(2 * scores * scale / softcap) + 1))
    return scores


@triton.jit
def _join(partial, weight, out, value_size: tl.constexpr, VALUE: tl.constexpr, SPLITS: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dv = tl.arange(0, VALUE)
    slot = lane * SPLITS + split
    top = tl.load(weight + slot * 2)
    total = tl.load(weight + slot * 2 + 1)
    share = tl.exp2(top - tl.max(top, 0))
    mixed = tl.load(partial + slot[:, None] * VALUE + dv[None, :])
    mixed = tl.sum(mixed * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + lane * value_size + dv, mixed.to(out.dtype.element_ty), mask=dv < value_size)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    lenders: Tensor | None = None,
    borrowed: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one new token for each of the first rows of a cache, whose key and value it also stores there.

    `query` [rows, heads, 1, D], `key` and `value` [rows, key heads, 1, D]; `keys` and `values` [.., key heads, capacity, D]
    hold positions before `positions` [rows]. Returns [rows, 1, heads, D]. Long rows of small batches are read in parts. The
    first `borrowed` positions of a row are also those of the row in `lenders`, and may be read there.
    """
    rows, query_heads, _, key_size = query.shape
    heads, value_size = key.shape[1], value.shape[3]
    group = query_heads // heads
    scale = key_size**-0.5 if scale is None else scale
    out = query.new_empty(rows, 1, query_heads, value_size)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1
    splits = _splits(rows * heads, keys.shape[2], window, processors)
    lanes, padded = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(value_size)
    block, warps, stages = _shape(lanes, max(key_size, value_size), keys.dtype)
    parts = splits if splits > 1 else 0
    partial = torch.empty(rows * query_heads, parts, padded, dtype=torch.float32, device=query.device)
    weight = torch.empty(rows * query_heads, parts, 2, dtype=torch.float32, device=query.device)
    _decode[(rows, heads, splits)](
        query, key, value, keys, values, positions, *(positions if x is None else x for x in (lenders, borrowed)),
        query if sinks is None else sinks, out, partial, weight,
        LOG2E if softcap else LOG2E * scale, scale, softcap or 0.0, window or 0,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        heads, group, key_size, value_size,
        GROUP=lanes, KEY=max(16, triton.next_power_of_2(key_size)), VALUE=padded, BLOCK=block,
        SPLITS=splits, WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        LENT=lenders is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * query_heads,)](partial, weight, out, value_size, VALUE=padded, SPLITS=splits, num_warps=1)
    return out


def _shape(lanes: int, size: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Positions read at a time, warps, and stages of the loop over them. One warp sums a row as those of the training kernel
    do, and many small programs hide each other's beginnings and ends; it must have registers for its queries, `lanes` of
    `size` numbers."""
    if size > LARGEST:
        return 32, 4, 3
    if dtype.itemsize == 2 and lanes * size <= 2048:
        return BLOCK, 1, 2 if size > 64 else 3
    return BLOCK, 4, 3


def _splits(programs: int, capacity: int, window: int | None, processors: int) -> int:
    """Parts in which a row is read, a power of two: enough to give every multiprocessor work, none shorter than 1024 tokens,
    because sums of parts round otherwise than training does."""
    longest = capacity if window is None else min(capacity, window)
    splits = 1
    while programs * splits < 2 * processors and longest // (2 * splits) >= 1024:
        splits *= 2
    return splits


# --- moving rows ---------------------------------------------------------------------------------------------------------


@triton.jit
def _copy(
    takers, givers, sources, targets, giver_row, giver_head, taker_row, taker_head, heads, count,
    KIND: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """`givers` and `takers` are addresses, of one tensor each for every layer."""
    pair = tl.program_id(0).to(tl.int64)
    tensor, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    from_row, to_row = pair, pair
    if GATHER:
        from_row = tl.load(sources + pair)
    if SCATTER:
        to_row = tl.load(targets + pair)
    giver = tl.load(givers + tensor).to(tl.pointer_type(KIND)) + from_row * giver_row + head * giver_head
    taker = tl.load(takers + tensor).to(tl.pointer_type(KIND)) + to_row * taker_row + head * taker_head
    giver, taker = tl.multiple_of(giver, ALIGNED), tl.multiple_of(taker, ALIGNED)
    tl.store(taker + at, tl.load(giver + at, mask=inside), mask=inside)


_KINDS = {1: tl.int8, 2: tl.int16, 4: tl.int32}
_ASIDE = 2**28
"""Bytes that are put aside at a time."""


def copy_rows(one: Tensor, addresses: Tensor, sources: Tensor, targets: Tensor, length: int, *, aside: bool) -> None:
    """The first `length` positions of some rows to others, all at once, in every tensor of `addresses`; all of them are like
    `one` [rows, heads, capacity, D]. `aside`: some targets are sources too, so all are put aside first."""
    _, heads, _, size = one.shape
    count, kind = length * size, _KINDS[one.element_size()]
    row, head = one.stride(0), one.stride(1)

    def copy(takers: Tensor, givers: Tensor, *strides: int, gather: bool, scatter: bool) -> None:
        grid = (len(sources), len(givers) * heads, triton.cdiv(count, 4096))
        # Where every head begins at a multiple of 16 bytes, so many are copied at once.
        aligned = 16 if all(stride * one.element_size() % 16 == 0 for stride in strides) else one.element_size()
        _copy[grid](
            takers, givers, sources, targets, *strides, heads, count,
            KIND=kind, GATHER=gather, SCATTER=scatter, BLOCK=4096, ALIGNED=aligned,
        )  # fmt: skip

    if not aside:
        copy(addresses, addresses, row, head, row, head, gather=True, scatter=True)
        return
    bytes_each = len(sources) * heads * count * one.element_size()
    for part in addresses.split(max(1, _ASIDE // bytes_each)):
        held = one.new_empty(len(part), len(sources), heads, length, size)
        places = torch.arange(len(part), device=one.device) * bytes_each + held.data_ptr()
        between = held.stride(1), held.stride(2)
        copy(places, part, row, head, *between, gather=True, scatter=False)
        copy(part, places, *between, row, head, gather=False, scatter=True)


# --- the draw of a token ---------------------------------------------------------------------------------------------------


@triton.jit
def _summarise(
    logits, rows, temperatures, tops, totals, places, vocabulary, stride, blocks, TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of one block of one row: its largest entry, where that stands, and the sum of exp(z - largest)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    if TEMPERATURE:
        z = z / tl.load(temperatures + tl.load(rows + row))
    top, place = tl.max(z, 0, return_indices=True)
    total = tl.sum(tl.exp(z - tl.where(top == float("-inf"), 0.0, top)), 0)
    at = row * blocks + block
    tl.store(tops + at, top)
    tl.store(totals + at, total)
    tl.store(places + at, block * BLOCK + place)


@triton.jit
def _uniform(stream, position):
    """A number in [0, 1) by splitmix64 at a counter: the sequence of `sampler.uniforms`."""
    z = stream.to(tl.uint64) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 16).to(tl.float64) * 3.552713678800501e-15  # 2 ** -48


@triton.jit
def _draw(
    logits, rows, temperatures, tops, totals, places, tokens, log_probs, stops, lengths, givens, limits, states, streams,
    greedys, vocabulary, stride, blocks, width, stop_count,
    TEMPERATURE: tl.constexpr, GREEDY: tl.constexpr, ALL_GREEDY: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    block = tl.arange(0, BLOCKS)
    known = block < blocks
    top = tl.load(tops + at * blocks + block, mask=known, other=float("-inf"))
    total = tl.load(totals + at * blocks + block, mask=known, other=0.0)
    highest = tl.max(top, 0)
    share = total.to(tl.float64) * tl.exp(top - highest).to(tl.float64)
    share = tl.where(known & (top > float("-inf")) | (total != total), share, 0.0)
    mass = tl.sum(share, 0)
    length = tl.load(lengths + row)
    temperature = 1.0
    if TEMPERATURE:
        temperature = tl.load(temperatures + row)
    token = tl.load(places + at * blocks + tl.argmax(top, 0)).to(tl.int64)
    if not ALL_GREEDY:
        target = _uniform(tl.load(streams + row), length) * mass
        bounds = tl.cumsum(share, 0)
        last = tl.max(tl.where(share > 0, block, 0), 0)
        chosen = tl.minimum(tl.sum((bounds <= target).to(tl.int32), 0), last)
        below = tl.sum(tl.where(block < chosen, share, 0.0), 0)
        inner = tl.arange(0, BLOCK)
        column = chosen * BLOCK + inner
        z = tl.load(logits + at * stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        entry = tl.exp(z - highest)
        inside = tl.sum((tl.cumsum(entry, 0) <= (target - below).to(tl.float32)).to(tl.int32), 0)
        inside = tl.minimum(inside, tl.max(tl.where(entry > 0, inner, 0), 0))
        drawn = (chosen * BLOCK + inside).to(tl.int64)
        if GREEDY:
            token = tl.where(tl.load(greedys + row), token, drawn)
        else:
            token = drawn
    valid = (mass == mass) & (mass < float("inf"))
    token = tl.where(valid, token, 0)
    z_token = tl.load(logits + at * stride + token).to(tl.float32) / temperature
    log_prob = z_token - highest - tl.log(mass).to(tl.float32)
    given = length < tl.load(givens + row)
    tl.store(tokens + row * width + length, token, mask=given == 0)
    tl.store(log_probs + row * width + length, log_prob, mask=given == 0)
    stop = tl.arange(0, STOPS)
    ends = tl.load(stops + row * stop_count + stop, mask=stop < stop_count, other=-1)
    stopped = tl.sum((ends == token).to(tl.int32), 0) > 0
    state = tl.load(states + row)
    after = tl.where(length + 1 >= tl.load(limits + row), _LENGTH, _RUNNING)
    after = tl.where(stopped, _STOP, after)
    after = tl.where(given, _RUNNING, after)
    after = tl.where(valid, after, _ERROR)
    running = state == _RUNNING
    tl.store(states + row, tl.where(running, after.to(tl.int64), state))
    tl.store(lengths + row, length + (running & valid).to(tl.int64))


def draw(logits: Tensor, rows: Tensor, fields: dict[str, Tensor], *, temperature: bool, greedy: bool, all_greedy: bool) -> None:
    """Sample a token for each of `rows` from `logits` [rows, vocabulary] and judge whether the row ends: `Rows.advance` for
    rows that use no other knob than the temperature. Two passes over the logits at most, the second over one block."""
    count, vocabulary = logits.shape
    assert logits.stride(1) == 1
    blocks = triton.cdiv(vocabulary, _DRAW_BLOCK)
    tops = torch.empty(count, blocks, dtype=torch.float32, device=logits.device)
    totals, places = torch.empty_like(tops), torch.empty(count, blocks, dtype=torch.int32, device=logits.device)
    stride = logits.stride(0)
    _summarise[(count, blocks)](
        logits, rows, fields["temperature"], tops, totals, places, vocabulary, stride, blocks,
        TEMPERATURE=temperature, BLOCK=_DRAW_BLOCK, num_warps=4,
    )  # fmt: skip
    f = fields
    _draw[(count,)](
        logits, rows, f["temperature"], tops, totals, places, f["tokens"], f["log_probs"], f["stops"], f["length"], f["given"],
        f["limit"], f["state"], f["stream"], f["greedy"], vocabulary, stride, blocks, f["tokens"].shape[1], f["stops"].shape[1],
        TEMPERATURE=temperature, GREEDY=greedy, ALL_GREEDY=all_greedy,
        BLOCK=_DRAW_BLOCK, BLOCKS=triton.next_power_of_2(blocks), STOPS=triton.next_power_of_2(f["stops"].shape[1]),
        num_warps=4,
    )  # fmt: skip
