"""Triton kernels that sample a token from the logits of each row. This file needs Triton and is imported only
on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_DRAW_BLOCK = 4096
_RUNNING, _STOP, _LENGTH, _ERROR = (tl.constexpr(state) for state in range(4))


@triton.jit
def _summarise(
    logits, rows, temperatures, tops, totals, places, vocabulary, stride, blocks,
    TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one block of one row: its largest entry, the index of that, and the sum of exp(z - largest)."""
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
    logits, rows, temperatures, tops, totals, places, tokens, log_probs, stops, lengths, num_known, limits,
    states, streams, greedys, vocabulary, stride, blocks, width, stop_count,
    TEMPERATURE: tl.constexpr, GREEDY: tl.constexpr, ALL_GREEDY: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr, AHEAD: tl.constexpr,
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
    if AHEAD:
        length += at % AHEAD
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
        z = tl.load(logits + at * stride + column, mask=column < vocabulary, other=float("-inf"))
        z = z.to(tl.float32) / temperature
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
    if AHEAD:  # the row stays as it is
        tl.store(tokens + at, token)
        tl.store(log_probs + at, log_prob)
        tl.store(states + at, valid)
    else:
        is_known = length < tl.load(num_known + row)
        tl.store(tokens + row * width + length, token, mask=is_known == 0)
        tl.store(log_probs + row * width + length, log_prob, mask=is_known == 0)
        stop = tl.arange(0, STOPS)
        ends = tl.load(stops + row * stop_count + stop, mask=stop < stop_count, other=-1)
        stopped = tl.sum((ends == token).to(tl.int32), 0) > 0
        state = tl.load(states + row)
        after = tl.where(length + 1 >= tl.load(limits + row), _LENGTH, _RUNNING)
        after = tl.where(stopped, _STOP, after)
        after = tl.where(is_known, _RUNNING, after)
        after = tl.where(valid, after, _ERROR)
        running = state == _RUNNING
        tl.store(states + row, tl.where(running, after.to(tl.int64), state))
        tl.store(lengths + row, length + (running & valid).to(tl.int64))


def draw(
    logits: Tensor,
    rows: Tensor,
    fields: dict[str, Tensor],
    *,
    temperature: bool,
    greedy: bool,
    all_greedy: bool,
    ahead: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a token for each of `rows` from `logits` [rows, vocabulary] and update the row's state: what
    DecodeRows.sample_next does for rows that use no other setting than the temperature. Two passes over the
    logits at most, the second over one block. With `ahead`: DecodeRows.sample_ahead."""
    count, vocabulary = logits.shape
    assert logits.stride(1) == 1
    blocks = triton.cdiv(vocabulary, _DRAW_BLOCK)
    tops, totals = torch.empty(2, count, blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(count, blocks, dtype=torch.int32, device=logits.device)
    f = fields
    _summarise[(count, blocks)](
        logits, rows, f["temperature"], tops, totals, places, vocabulary, logits.stride(0), blocks,
        TEMPERATURE=temperature, BLOCK=_DRAW_BLOCK, num_warps=4,
    )  # fmt: skip
    out = (f["tokens"], f["log_probs"], f["state"])
    if ahead:
        out = (rows.new_empty(count), tops.new_empty(count), rows.new_empty(count, dtype=torch.bool))
    _draw[(count,)](
        logits, rows, f["temperature"], tops, totals, places, out[0], out[1], f["stops"],
        f["length"], f["num_known"], f["limit"], out[2], f["stream"], f["greedy"],
        vocabulary, logits.stride(0), blocks, f["tokens"].shape[1], f["stops"].shape[1],
        TEMPERATURE=temperature, GREEDY=greedy, ALL_GREEDY=all_greedy,
        BLOCK=_DRAW_BLOCK, BLOCKS=triton.next_power_of_2(blocks),
        STOPS=triton.next_power_of_2(f["stops"].shape[1]), AHEAD=ahead, num_warps=4,
    )  # fmt: skip
    return out
