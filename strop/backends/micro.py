"""Cutting a batch into micro-batches, and bringing each to its device. The order and the size never change a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strop.backends.base import MicroBatching
from strop.data.balance import Partition, balanced_partitions, micro_batches, workload
from strop.types import LISTS, Batch


def partition(batch: Batch, micro: MicroBatching) -> Partition:
    """Row numbers of each micro-batch. Rows of similar length share one, longest first: a lack of memory shows at once."""
    lengths = batch.lengths
    if not lengths:
        raise ValueError("The batch is empty; there is nothing to compute.")
    size = micro.together
    if size < 1 or len(lengths) % size:
        raise ValueError(f"{len(lengths)} rows cannot be kept together by {size}.")
    blocks = [list(range(start, start + size)) for start in range(0, len(lengths), size)]
    weights = [sum(lengths[row] for row in block) for block in blocks]
    if micro.max_tokens is not None:
        parts = [[row // size for row in part[::size]] for part in micro_batches(lengths, micro.max_tokens, group_size=size)]
    else:
        if micro.rows < size:
            least = "one row" if size == 1 else f"{size} rows"
            raise ValueError(f"A micro-batch needs at least {least}, not {micro.rows}.")
        order = sorted(range(len(blocks)), key=lambda block: -weights[block])
        parts = [order[at : at + micro.rows // size] for at in range(0, len(order), micro.rows // size)]
    return [[row for block in sorted(part, key=lambda b: -weights[b]) for row in blocks[block]] for part in parts]


def halved(micro: MicroBatching, lengths: Sequence[int]) -> MicroBatching | None:
    """Micro-batches of half the size; None where they are as small as they can be."""
    size = micro.together
    if micro.max_tokens is not None:
        largest = max(sum(lengths[at : at + size]) for at in range(0, len(lengths), size))
        budget = max(largest, min(micro.max_tokens, sum(lengths)) // 2)
        return dataclasses.replace(micro, max_tokens=budget) if budget < micro.max_tokens else None
    rows = max(size, min(micro.rows, len(lengths)) // 2 // size * size)
    return dataclasses.replace(micro, rows=rows) if rows < micro.rows else None


def deal(lengths: Sequence[int], parts: int, *, together: int = 1) -> Partition:
    """Rows for each of `parts` ranks, of nearly equal work; `together` consecutive rows are never parted. With fewer rows than
    ranks some get none."""
    if not lengths or len(lengths) % together:
        raise ValueError(f"{len(lengths)} rows cannot be kept together by {together}.")
    costs = workload(lengths).reshape(-1, together).sum(1).tolist()
    dealt = balanced_partitions(costs, min(parts, len(costs)))
    rows = [[row for block in part for row in range(block * together, (block + 1) * together)] for part in dealt]
    return rows + [[] for _ in range(parts - len(rows))]


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The tensors of `batch` on `device`; token ids and prompt lengths stay, the model's inputs are laid out from them."""
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor) and field.metadata["role"] != LISTS and field.name != "prompt_lengths":
            moved[field.name] = value.to(device, non_blocking=True)
    return batch.replace(**moved)
