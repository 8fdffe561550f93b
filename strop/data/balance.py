"""Load balancing: equal work for every rank, and micro-batches within a token budget.

All functions take sequence lengths and return lists of row indices. The multiway differencing method of
Karmarkar and Karp (1982) keeps the heaviest part close to the mean.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Partition = list[list[int]]
_Part = tuple[int, int, int, list[int]]
"""Weight, count, first row, rows: sorting has no ties, because the rows are disjoint."""


def workload(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the cost of sequences of L tokens, 24576 L + L²: matmuls are linear in L, attention is
    quadratic.

    The constant is the ratio of the two for a model of hidden size 4096 (six times the hidden size).
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    return 24576 * tokens + tokens * tokens


def karmarkar_karp(weights: Sequence[int], parts: int, *, equal_size: bool = False) -> Partition:
    """Divide rows into `parts` of nearly equal weight; with `equal_size` also of exactly equal count.

    Largest differencing: keep a heap of partial partitions ordered by spread (heaviest part minus lightest),
    and repeatedly merge the two with the largest spread, heavy parts of one with light parts of the other.
    The heaviest part comes first.
    """
    _check_parts(len(weights), parts, equal_size)
    order = sorted(range(len(weights)), key=lambda row: (weights[row], row))
    step = 1
    if equal_size:
        step = parts
    heap = []
    for start in range(0, len(order), step):
        state: list[_Part] = [(int(weights[row]), 1, row, [row]) for row in order[start : start + step]]
        state.sort(reverse=True)
        heap.append(_keyed(state, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        widest = heapq.heappop(heap)[1]
        merged = _merge(widest, heap[0][1], parts)
        heapq.heapreplace(heap, _keyed(merged, parts))
    return [rows for _, _, _, rows in heap[0][1]]


def balanced_partitions(weights: Sequence[int], parts: int, *, equal_size: bool = False) -> Partition:
    """`karmarkar_karp` with the rows of each part in their original order."""
    return [sorted(rows) for rows in karmarkar_karp(weights, parts, equal_size=equal_size)]


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    min_count: int = 1,
    count_multiple: int = 1,
    group_size: int = 1,
    padded_width: int | None = None,
    light_ends: bool = True,
) -> Partition:
    """Split rows into micro-batches of at most `max_tokens` tokens and nearly equal work.

    The count starts at ceil(tokens / max_tokens), at least `min_count`, rounded up to `count_multiple`
    (pipeline stages), and grows until every micro-batch fits. All ranks must run the same count: pass the
    largest one as `min_count`. With `group_size`, that many consecutive rows are never separated.
    `padded_width` is given for padded micro-batches, so that a budget below one row raises. `light_ends` puts
    the light ones first and last, where pipeline bubbles are.
    """
    blocks = _blocks(lengths, max_tokens, group_size, padded_width)
    block_tokens = [_total(lengths, rows) for rows in blocks]
    block_costs = _block_costs(lengths, blocks)
    alone = sum(2 * tokens > max_tokens for tokens in block_tokens)  # no two of them fit together
    count = max(min_count, math.ceil(sum(block_tokens) / max_tokens), alone, 1)
    most = len(blocks) // count_multiple * count_multiple
    while True:
        count = math.ceil(count / count_multiple) * count_multiple
        if count > len(blocks):
            unit = "rows"
            if group_size > 1:
                unit = "groups"
            raise ValueError(
                f"{count} micro-batches were asked for, but there are only {len(blocks)} {unit} to fill them "
                f"(min_count={min_count}, count_multiple={count_multiple}, max_tokens={max_tokens}). Raise "
                "the token budget or the batch size."
            )
        parts = balanced_partitions(block_costs, count)
        if max(_total(block_tokens, part) for part in parts) <= max_tokens:
            break
        # One by one would take minutes for tens of thousands of rows. The largest count is always tried.
        grown = count + max(1, count // 100)
        count = min(grown, most) if count < most else grown
    if light_ends:
        parts.sort(key=lambda part: (_total(block_costs, part), part[0]), reverse=True)
        parts = light_ends_order(parts)
    return [_rows_of(part, blocks) for part in parts]


def neighbour_micro_batches(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> Partition:
    """Cut the rows in this order, in which neighbours share tokens, into micro-batches of at most
    `max_tokens` tokens and nearly equal numbers of them."""
    _blocks(lengths, max_tokens, 1, None)  # refuses a row that is too long
    ends = np.cumsum([lengths[row] for row in order])
    middles = ends - np.asarray([lengths[row] for row in order]) / 2
    count = math.ceil(int(ends[-1]) / max_tokens)
    while True:
        parts: dict[int, list[int]] = {}
        for row, part in zip(order, (middles * count / ends[-1]).astype(int).tolist(), strict=True):
            parts.setdefault(part, []).append(row)
        if max(_total(lengths, rows) for rows in parts.values()) <= max_tokens:
            return list(parts.values())
        count += max(1, count // 100)


def light_ends_order(heaviest_first: Partition) -> Partition:
    """Return the parts with the heaviest in the middle and the lightest at both ends."""
    return heaviest_first[::2][::-1] + heaviest_first[1::2]


def imbalance_metrics(
    lengths: Sequence[int], partition: Sequence[Sequence[int]], *, prefix: str = "global_seqlen"
) -> dict[str, float]:
    """Return metrics of the tokens per rank, before balancing (contiguous rows) and after it."""
    parts = len(partition)
    before = [int(sum(chunk)) for chunk in np.array_split(np.asarray(lengths, dtype=np.int64), parts)]
    after = [_total(lengths, rows) for rows in partition]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(before) / parts,
    }


def _keyed(state: list[_Part], parts: int) -> tuple[tuple[int, int, int, int], list[_Part]]:
    """Return a heap entry: largest spread first, then the heaviest part. A state has its non-empty parts
    only."""
    weight, count, first, _ = state[0]
    lightest = 0
    if len(state) == parts:
        lightest = state[-1][0]
    return (lightest - weight, -weight, -count, -first), state


def _merge(wide: list[_Part], narrow: list[_Part], parts: int) -> list[_Part]:
    """Join the i-th heaviest part of `wide` with the i-th lightest of `narrow`; empty parts are the
    lightest."""
    unpaired = parts - len(narrow)
    merged = wide[:unpaired]
    for index in range(unpaired, len(wide)):
        weight, count, first, rows = wide[index]
        other = narrow[parts - 1 - index]
        rows.extend(other[3])
        merged.append((weight + other[0], count + other[1], first, rows))
    merged.extend(narrow[: parts - len(wide)])
    merged.sort(reverse=True)
    return merged


def _blocks(lengths: Sequence[int], max_tokens: int, group_size: int, padded_width: int | None) -> Partition:
    if padded_width is not None and max_tokens < padded_width:
        raise ValueError(
            f"max_tokens={max_tokens} is below one padded row of {padded_width} tokens; set it to "
            f"{padded_width} or more."
        )
    if not lengths or len(lengths) % group_size:
        raise ValueError(f"{len(lengths)} rows cannot be divided into groups of group_size={group_size}.")
    blocks = [list(range(start, start + group_size)) for start in range(0, len(lengths), group_size)]
    for rows in blocks:
        tokens = _total(lengths, rows)
        if tokens > max_tokens:
            what = f"row {rows[0]}"
            if group_size > 1:
                what = f"the group of rows {rows[0]}..{rows[-1]}"
            raise ValueError(
                f"{what} has {tokens} tokens, over max_tokens={max_tokens}; set it to {tokens} or more."
            )
    return blocks


def _total(values: Sequence[int], rows: Sequence[int]) -> int:
    return sum(int(values[row]) for row in rows)


def _block_costs(lengths: Sequence[int], blocks: Partition) -> list[int]:
    costs = workload(lengths)
    return [int(costs[rows].sum()) for rows in blocks]


def _rows_of(part: Sequence[int], blocks: Partition) -> list[int]:
    """Return the rows of the blocks in a part."""
    return list(chain.from_iterable(blocks[block] for block in part))


def _check_parts(rows: int, parts: int, equal_size: bool) -> None:
    if parts < 1 or rows < parts:
        raise ValueError(f"{rows} rows cannot fill {parts} parts; ask for 1 to {rows} parts.")
    if equal_size and rows % parts:
        raise ValueError(
            f"{rows} rows cannot be divided equally into {parts} parts; use a multiple of {parts} rows."
        )
