"""Triton kernels for the parts of a pass with drafts that plain torch computes with dozens of small kernels.

The search for drafts gives what `propose` defines, and the choice of those that are kept what `verify`
defines. This file needs Triton and is imported only on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strop.rollout.native.quantization.kernels import shortened

_BLOCK = 1024
_RUNNING, _STOP, _LENGTH, _ERROR = (tl.constexpr(state) for state in range(4))


@triton.jit
def _store(
    key, value, keys, values, positions, table,
    key_row, key_head, value_row, value_head, keys_page, keys_head, values_page, values_head, table_row,
    key_exponents, value_exponents, exponents_page, exponents_head,
    key_size: tl.constexpr, value_size: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, PAGE: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    page = tl.load(table + row * table_row + position // PAGE).to(tl.int64)
    dk = tl.arange(0, KEY)
    dv = tl.arange(0, VALUE)
    k = tl.load(key + row * key_row + head * key_head + dk, mask=dk < key_size, other=0.0)
    v = tl.load(value + row * value_row + head * value_head + dv, mask=dv < value_size, other=0.0)
    if SHORT:
        k, k_exponent = shortened(k)
        v, v_exponent = shortened(v)
        at = page * exponents_page + head * exponents_head + position % PAGE
        tl.store(key_exponents + at, k_exponent)
        tl.store(value_exponents + at, v_exponent)
    k_at = keys + page * keys_page + head * keys_head + position % PAGE * key_size + dk
    v_at = values + page * values_page + head * values_head + position % PAGE * value_size + dv
    tl.store(k_at, k, mask=dk < key_size)
    tl.store(v_at, v, mask=dv < value_size)


def store(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor,
    exponents: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Put `key` and `value` [rows, heads, 1, D] into the pages [pages, heads, positions, D] of `table` [rows,
    pages], at `positions` [rows]. Pages of 8 bits have `exponents`: see decode_attention."""
    rows, heads, _, key_size = key.shape
    value_size = value.shape[3]
    key_exponents, value_exponents = exponents or (table, table)
    _store[(rows, heads)](
        key, value, keys, values, positions, table,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), table.stride(0),
        key_exponents, value_exponents, *(exponents[0].stride()[:2] if exponents else (0, 0)),
        key_size, value_size, KEY=triton.next_power_of_2(key_size), VALUE=triton.next_power_of_2(value_size),
        PAGE=keys.shape[2], SHORT=exponents is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _search(
    source, tokens, lengths, best, width, source_row, tokens_row, best_row, first,
    OWN: tl.constexpr, MATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best match that ends in one block of one row: its length, then OWN, then its place."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + row).to(tl.int32)
    line = source + row * source_row
    if OWN:
        run = (place < width) & (place < length - 1)
    else:
        run = tl.load(line + place + 1, mask=place + 1 < width, other=-1) >= 0
    count = tl.zeros([BLOCK], tl.int64)
    for i in range(MATCH):
        newest = tl.load(tokens + row * tokens_row + tl.maximum(length - 1 - i, 0))
        run = run & (place >= i) & (length > i)
        found = tl.load(line + place - i, mask=run, other=-1)
        run = run & (found.to(tl.int64) == newest)
        count += run.to(tl.int64)
    own = tl.full([BLOCK], OWN, tl.int64)
    score = tl.where(count > 0, (count * 2 + own) * 4294967296 + place, 0)
    tl.store(best + row * best_row + first + block, tl.max(score, 0))


@triton.jit
def _draft(
    best, tokens, lengths, num_known, lines, drafts, blocks, width, capacity,
    tokens_row, lines_row, NUM: tl.constexpr, MIN: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    score = tl.max(tl.load(best + row * blocks + block, mask=block < blocks, other=0), 0)
    place = score % 4294967296
    is_own = score // 4294967296 % 2 == 1
    match = score // 8589934592
    length = tl.load(lengths + row)
    known = tl.load(num_known + row)
    j = tl.arange(0, LANES)
    wanted = (j < NUM) & (match >= MIN)
    sequence = tokens + row * tokens_row
    period = tl.maximum(length - 1 - place, 1)
    own = tl.load(sequence + place + 1 + j % period, mask=wanted & is_own, other=-1)
    at = place + 1 + j
    inside = wanted & (is_own == 0) & (at < width)
    line = tl.load(lines + row * lines_row + at, mask=inside, other=-1).to(tl.int64)
    end = tl.min(tl.where((line < 0) & (j < NUM), j, LANES), 0)
    line = tl.where(j < end, line, -1)
    draft = tl.where(is_own, own, line)
    draft = tl.where(length < known, -1, draft)
    given = tl.load(sequence + length + j, mask=(j < NUM) & (length + j < known), other=-1)
    draft = tl.where(length + j < known, given, draft)
    draft = tl.where(length + j + 2 <= capacity, draft, -1)
    tl.store(drafts + row * NUM + j, draft, mask=j < NUM)
    tl.store(sequence + length + j, tl.maximum(draft, 0), mask=(j < NUM) & (length + j <= capacity))


def propose(
    fields: dict[str, Tensor],
    count: int,
    lines: Tensor,
    num_tokens: int,
    longest: int,
    *,
    min_match: int,
    max_match: int,
) -> Tensor:
    """What Drafts.propose computes for the first `count` rows, with `lines` [count, width]."""
    tokens = fields["tokens"]
    width = lines.shape[1]
    line_blocks = triton.cdiv(width, _BLOCK)
    blocks = line_blocks + triton.cdiv(longest, _BLOCK)
    best = torch.empty(count, blocks, dtype=torch.int64, device=tokens.device)
    drafts = torch.empty(count, num_tokens, dtype=torch.int64, device=tokens.device)
    sources = ((lines, width, 0, line_blocks), (tokens, longest, line_blocks, blocks - line_blocks))
    for own, (source, size, first, number) in enumerate(sources):
        _search[(count, number)](
            source, tokens, fields["length"], best, size, source.stride(0), tokens.stride(0), blocks, first,
            OWN=own, MATCH=max_match, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    _draft[(count,)](
        best, tokens, fields["length"], fields["num_known"], lines, drafts, blocks, width,
        tokens.shape[1] - 1, tokens.stride(0), lines.stride(0), NUM=num_tokens, MIN=min_match,
        LANES=triton.next_power_of_2(num_tokens), BLOCKS=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return drafts


@triton.jit
def _keep(
    sampled, sampled_log_probs, valids, drafts, tokens, log_probs, stops, lengths, num_known, limits, states,
    counts, tokens_row, stop_count,
    AHEAD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, LANES)
    inside = j < AHEAD
    length = tl.load(lengths + row)
    place = tokens + row * tokens_row + length + j
    known = inside & (length + j < tl.load(num_known + row))
    token = tl.load(sampled + row * AHEAD + j, mask=inside, other=0)
    token = tl.where(known, tl.load(place, mask=known, other=0), token)
    valid = tl.load(valids + row * AHEAD + j, mask=inside, other=0) != 0
    draft = tl.load(drafts + row * (AHEAD - 1) + j, mask=j < AHEAD - 1, other=-2)
    stopped = j < 0
    for i in range(stop_count):
        stopped = stopped | (token == tl.load(stops + row * stop_count + i))
    after = tl.where(length + j + 1 >= tl.load(limits + row), _LENGTH, _RUNNING)
    after = tl.where(stopped, _STOP, after)
    after = tl.where(known, _RUNNING, after)
    after = tl.where(valid, after, _ERROR)
    same = token == draft
    last = tl.min(tl.where(inside & ((same == 0) | (after != _RUNNING)), j, LANES), 0)
    state = tl.load(states + row)
    running = state == _RUNNING
    reached = running & (j <= last)
    kept = reached & valid
    tl.store(place, token, mask=kept & (known == 0))
    shift = row * tokens_row + length + j
    new = tl.load(sampled_log_probs + row * AHEAD + j, mask=inside, other=0.0)
    tl.store(log_probs + shift, new, mask=kept & (known == 0))
    end = tl.sum(tl.where(j == last, after, 0), 0)
    tl.store(states + row, tl.where(running, end.to(tl.int64), state))
    tl.store(lengths + row, length + tl.sum(kept.to(tl.int64), 0))
    drafted = running & (draft >= 0) & (known == 0)
    accepted = drafted & reached & same
    tl.atomic_add(counts, tl.sum(drafted.to(tl.int32), 0))
    tl.atomic_add(counts + 1, tl.sum(accepted.to(tl.int32), 0))
    tl.atomic_add(counts + 2 + j, kept.to(tl.int32), mask=inside)


def keep(
    fields: dict[str, Tensor],
    drafts: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    valid: Tensor,
    counts: Tensor,
) -> None:
    """What verify.judge and verify.write do for the first rows; adds to `counts` as Drafts.keep does."""
    count, num_tokens = drafts.shape
    f = fields
    _keep[(count,)](
        tokens, log_probs, valid, drafts, f["tokens"], f["log_probs"], f["stops"], f["length"],
        f["num_known"], f["limit"], f["state"], counts, f["tokens"].stride(0), f["stops"].shape[1],
        AHEAD=num_tokens + 1, LANES=triton.next_power_of_2(num_tokens + 1), num_warps=1,
    )  # fmt: skip
