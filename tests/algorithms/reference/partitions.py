"""Partitions of verl and OpenRLHF that Strop does not use, for comparison with those that it uses."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain

from strop.data.balance import Partition, balanced_partitions, workload


def greedy_partition(weights: Sequence[int], parts: int, *, equal_size: bool = False) -> Partition:
    """Assign each row, in order, to the lightest part so far (with `equal_size`: among those with fewest
    rows)."""
    assert len(weights) >= parts and not (equal_size and len(weights) % parts)
    chosen: Partition = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]
    for row, weight in enumerate(weights):
        count, total, part = heapq.heappop(heap)
        chosen[part].append(row)
        if equal_size:
            count += 1
        heapq.heappush(heap, (count, total + int(weight), part))
    return chosen


def group_balanced_partitions(lengths: Sequence[int], groups: Sequence[object], parts: int) -> Partition:
    """Balance whole groups (the samples of one prompt), with the same number of groups in every part."""
    if len(groups) != len(lengths):
        raise ValueError(
            f"`groups` names {len(groups)} rows but `lengths` has {len(lengths)}; both need one entry per "
            "row."
        )
    members: dict[object, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    blocks = list(members.values())
    if len(blocks) % parts:
        raise ValueError(
            f"{len(blocks)} groups cannot be divided evenly into {parts} parts; make the number of prompts a "
            f"multiple of {parts}."
        )
    partition = balanced_partitions(
        [int(workload([lengths[row] for row in rows]).sum()) for rows in blocks], parts, equal_size=True
    )
    return [list(chain.from_iterable(blocks[block] for block in part)) for part in partition]


def first_fit_count(lengths: Sequence[int], max_tokens: int) -> int:
    """Return the number of bins that first-fit needs, in the given order; a row over the budget fills one
    bin."""
    free_tokens: list[int] = []
    for length in lengths:
        for bin_index, free in enumerate(free_tokens):
            if length <= free:
                free_tokens[bin_index] -= length
                break
        else:
            free_tokens.append(max_tokens - length)
    return len(free_tokens)


def inverse_permutation(order: Sequence[int]) -> list[int]:
    """Return the position of each row: `shuffled[inverse[i]]` is row i, if `shuffled[j]` is row
    `order[j]`."""
    inverse = [-1] * len(order)
    for position, row in enumerate(order):
        if not 0 <= row < len(order) or inverse[row] >= 0:
            raise ValueError(
                f"`order` is not a permutation of 0..{len(order) - 1}: entry {position} is {row}."
            )
        inverse[row] = position
    return inverse


def restore_order(partition: Sequence[Sequence[int]]) -> list[int]:
    """Return the index that restores the original order: `concatenated[restore_order(parts)]`."""
    return inverse_permutation(list(chain.from_iterable(partition)))
