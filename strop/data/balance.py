"""Equal work for every rank and a token budget for every micro-batch.

Everything here speaks of indices: sequence lengths go in, lists of row numbers come out, and `inverse_permutation` undoes any
reordering. The multiway differencing method of Karmarkar and Karp (1982) keeps the heaviest part within a hair of the mean.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Partition = list[list[int]]
_Part = tuple[int, int, int, list[int]]  # weight, count, first row, rows: an order without ties, since rows are disjoint


def workload(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Cost of a sequence of L tokens, 24576 L + L²: matrix products are linear in L, attention is quadratic.

    The constant is the ratio of the two for a model of hidden size 4096 (six times the hidden size).
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    return 24576 * tokens + tokens * tokens


def karmarkar_karp(weights: Sequence[int], parts: int, *, equal_size: bool = False) -> Partition:
    """Divide rows into `parts` of nearly equal weight; with `equal_size` also of exactly equal count.

    Largest differencing: keep a heap of partial partitions ordered by spread (heaviest part minus lightest), and repeatedly
    merge the two widest, heavy parts of one with light parts of the other. Parts come heaviest first.
    """
    _check_parts(len(weights), parts, equal_size)
    order = sorted(range(len(weights)), key=lambda row: (weights[row], row))
    step = parts if equal_size else 1
    heap = []
    for start in range(0, len(order), step):
        state = sorted(((int(weights[row]), 1, row, [row]) for row in order[start : start + step]), reverse=True)
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


def greedy_partition(weights: Sequence[int], parts: int, *, equal_size: bool = False) -> Partition:
    """Give each row, in the order it arrives, to the lightest part so far (with `equal_size`: among the least filled)."""
    _check_parts(len(weights), parts, equal_size)
    chosen: Partition = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]
    for row, weight in enumerate(weights):
        count, total, part = heapq.heappop(heap)
        chosen[part].append(row)
        heapq.heappush(heap, (count + 1 if equal_size else 0, total + int(weight), part))
    return chosen


def group_balanced_partitions(lengths: Sequence[int], groups: Sequence[object], parts: int) -> Partition:
    """Balance whole groups (the samples of one prompt stay together), the same number of groups in every part."""
    if len(groups) != len(lengths):
        raise ValueError(f"`groups` names {len(groups)} rows but `lengths` has {len(lengths)}; both need one entry per row.")
    members: dict[object, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    blocks = list(members.values())
    if len(blocks) % parts:
        raise ValueError(
            f"{len(blocks)} groups cannot be dealt evenly to {parts} parts; make the number of prompts a multiple of {parts}."
        )
    costs = workload(lengths)
    dealt = balanced_partitions([int(costs[rows].sum()) for rows in blocks], parts, equal_size=True)
    return [[row for block in part for row in blocks[block]] for part in dealt]


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

    The count starts at ceil(tokens / max_tokens), at least `min_count`, rounded up to `count_multiple` (pipeline stages), and
    grows until every micro-batch fits. All ranks must run the same count: pass the largest one as `min_count`. With
    `group_size`, that many consecutive rows are never parted. `padded_width` is given when the micro-batches stay padded, so
    that a budget below one row is refused. `light_ends` puts the light ones first and last, where pipeline bubbles are.
    """
    blocks = _blocks(lengths, max_tokens, group_size, padded_width)
    costs = workload(lengths)
    block_tokens = [sum(int(lengths[row]) for row in rows) for rows in blocks]
    block_costs = [int(costs[rows].sum()) for rows in blocks]
    count = max(min_count, math.ceil(sum(block_tokens) / max_tokens), 1)
    while True:
        count = math.ceil(count / count_multiple) * count_multiple
        if count > len(blocks):
            raise ValueError(
                f"{count} micro-batches were asked for, but there are only {len(blocks)} "
                f"{'groups' if group_size > 1 else 'rows'} to fill them (min_count={min_count}, "
                f"count_multiple={count_multiple}, max_tokens={max_tokens}). Raise the token budget or the batch size."
            )
        parts = balanced_partitions(block_costs, count)
        if all(sum(block_tokens[block] for block in part) <= max_tokens for part in parts):
            break
        count += max(1, count // 100)  # one by one would take minutes for tens of thousands of rows
    if light_ends:
        parts.sort(key=lambda part: (sum(block_costs[block] for block in part), part[0]), reverse=True)
        parts = both_ends(parts)
    return [[row for block in part for row in blocks[block]] for part in parts]


def both_ends(heaviest_first: Partition) -> Partition:
    """Reorder so that the heaviest sits in the middle and weights fall towards both ends."""
    return heaviest_first[::2][::-1] + heaviest_first[1::2]


def first_fit_count(lengths: Sequence[int], max_tokens: int) -> int:
    """How many bins first-fit needs, in the given order; a row over the budget gets a bin of its own."""
    room: list[int] = []
    for length in lengths:
        for place, free in enumerate(room):
            if length <= free:
                room[place] -= length
                break
        else:
            room.append(max_tokens - length)
    return len(room)


def inverse_permutation(order: Sequence[int]) -> list[int]:
    """Where each row went: `shuffled[inverse[i]]` is row i, given `shuffled[j]` is row `order[j]`."""
    inverse = [-1] * len(order)
    for place, row in enumerate(order):
        if not 0 <= row < len(order) or inverse[row] >= 0:
            raise ValueError(f"`order` is not a permutation of 0..{len(order) - 1}: entry {place} is {row}.")
        inverse[row] = place
    return inverse


def restore_order(partition: Sequence[Sequence[int]]) -> list[int]:
    """The index that undoes a concatenation of micro-batches: `concatenated[restore_order(parts)]` is the original order."""
    return inverse_permutation([row for part in partition for row in part])


def imbalance_metrics(
    lengths: Sequence[int], partition: Sequence[Sequence[int]], *, prefix: str = "global_seqlen"
) -> dict[str, float]:
    """Tokens per rank before balancing (contiguous rows) and after it."""
    parts = len(partition)
    before = [int(sum(chunk)) for chunk in np.array_split(np.asarray(lengths, dtype=np.int64), parts)]
    after = [sum(int(lengths[row]) for row in rows) for rows in partition]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(before) / parts,
    }


def _keyed(state: list[_Part], parts: int) -> tuple[tuple[int, int, int, int], list[_Part]]:
    """Heap key: widest spread first, then the heaviest leading part. A state lists its non-empty parts only."""
    weight, count, first, _ = state[0]
    lightest = state[-1][0] if len(state) == parts else 0
    return (lightest - weight, -weight, -count, -first), state


def _merge(wide: list[_Part], narrow: list[_Part], parts: int) -> list[_Part]:
    """Pair the i-th heaviest of `wide` with the i-th lightest of `narrow`, empty parts counting as lightest."""
    alone = parts - len(narrow)
    merged = wide[:alone]
    for place in range(alone, len(wide)):
        weight, count, first, rows = wide[place]
        other = narrow[parts - 1 - place]
        rows.extend(other[3])
        merged.append((weight + other[0], count + other[1], first, rows))
    merged.extend(narrow[: parts - len(wide)])
    merged.sort(reverse=True)
    return merged


def _blocks(lengths: Sequence[int], max_tokens: int, group_size: int, padded_width: int | None) -> Partition:
    if padded_width is not None and max_tokens < padded_width:
        raise ValueError(
            f"max_tokens={max_tokens} is below one padded row of {padded_width} tokens; set it to {padded_width} or more."
        )
    if not lengths or len(lengths) % group_size:
        raise ValueError(f"{len(lengths)} rows cannot be cut into groups of group_size={group_size}.")
    blocks = [list(range(start, start + group_size)) for start in range(0, len(lengths), group_size)]
    for rows in blocks:
        tokens = sum(int(lengths[row]) for row in rows)
        if tokens > max_tokens:
            what = f"row {rows[0]}" if group_size == 1 else f"the group of rows {rows[0]}..{rows[-1]}"
            raise ValueError(f"{what} has {tokens} tokens, over max_tokens={max_tokens}; set it to {tokens} or more.")
    return blocks


def _check_parts(rows: int, parts: int, equal_size: bool) -> None:
    if parts < 1 or rows < parts:
        raise ValueError(f"{rows} rows cannot fill {parts} parts; ask for 1 to {rows} parts.")
    if equal_size and rows % parts:
        raise ValueError(f"{rows} rows cannot be divided equally into {parts} parts; use a multiple of {parts} rows.")
