"""Micro-batches: cutting a batch into them, sharding rows over ranks, finding rows with a loss that is not
finite, and retrying a pass that was out of memory (OOM) with smaller ones. Order and size of micro-batches
never change a result."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from strop.backends.base import MicroBatching, nothing_to_release
from strop.backends.trees import partition_trees
from strop.data.balance import (
    Partition,
    balanced_partitions,
    micro_batches,
    neighbour_micro_batches,
    workload,
)
from strop.ranks import Ranks
from strop.types import LISTS, ROWS, TOKENS, Batch

log = logging.getLogger(__name__)
Result = TypeVar("Result")
_UNEQUAL = 1.05
"""Ranks keep prompts together if the work of the busiest is at most this times the mean: a shared prompt
saves more than that where it is a twentieth of its rows."""

# --- cutting ------------------------------------------------------------------------------------------------


def partition(batch: Batch, micro: MicroBatching) -> Partition:
    """Row numbers of each micro-batch, the longest first: OOM shows at once. Filled by tokens, or with
    images, rows of one prompt are neighbours: a pass computes a common prompt and its images once. Otherwise
    rows of similar length share a micro-batch."""
    lengths = batch.lengths
    if not lengths:
        raise ValueError("The batch is empty; there is nothing to compute.")
    if batch.episodes is not None:
        return partition_trees(
            batch.sequences, batch.episodes.tolist(), rows=micro.rows, max_tokens=micro.max_tokens
        )
    size = micro.rows_per_item
    if size < 1 or len(lengths) % size:
        raise ValueError(f"{len(lengths)} rows cannot be kept together by {size}.")
    weights = [sum(lengths[start : start + size]) for start in range(0, len(lengths), size)]
    prompts = rows_by_prompt(batch)
    if (
        size == 1
        and len(prompts) < len(lengths)
        and (micro.max_tokens is not None or batch.images is not None)
    ):
        return _neighbours(lengths, prompts, micro)
    if micro.max_tokens is not None:
        read = [max(1, length - micro.unread) for length in lengths]
        parts = _blocks_by_tokens(read, micro.max_tokens, size)
    else:
        parts = _blocks_by_rows(weights, micro.rows, size)
    return [_rows_of(sorted(part, key=lambda block: -weights[block]), size) for part in parts]


def rows_by_prompt(batch: Batch) -> list[list[int]]:
    """The rows of each prompt, with the same images."""
    found: dict[object, list[int]] = {}
    prompts = batch.prompt_lengths.tolist()
    for row, (sequence, length) in enumerate(zip(batch.sequences, prompts, strict=True)):
        images: list[str] = []
        if batch.images is not None:
            images = [image.digest for image in batch.images[row]]
        found.setdefault((sequence[:length].numpy().tobytes(), *images), []).append(row)
    return list(found.values())


def _neighbours(lengths: Sequence[int], prompts: Partition, micro: MicroBatching) -> Partition:
    """Micro-batches of neighbours, where rows of a prompt are."""
    by_length = [sorted(rows, key=lambda row: -lengths[row]) for rows in prompts]
    by_length.sort(key=lambda rows: -lengths[rows[0]])
    order = [row for rows in by_length for row in rows]
    if micro.max_tokens is None:
        if micro.rows < 1:
            raise ValueError(f"A micro-batch needs at least one row, not {micro.rows}.")
        return [order[start : start + micro.rows] for start in range(0, len(order), micro.rows)]
    read = [max(1, length - micro.unread) for length in lengths]
    parts = neighbour_micro_batches(read, order, micro.max_tokens)
    return sorted(parts, key=lambda part: -sum(read[row] for row in part))


def largest_part(batch: Batch, micro: MicroBatching) -> int:
    """Tokens of the largest micro-batch."""
    lengths = batch.lengths
    return max(sum(lengths[row] for row in part) for part in partition(batch, micro))


def _blocks_by_tokens(lengths: Sequence[int], max_tokens: int, size: int) -> list[list[int]]:
    """Blocks of `size` rows for each micro-batch, filled by tokens."""
    parts = micro_batches(lengths, max_tokens, group_size=size)
    return [[row // size for row in part[::size]] for part in parts]


def _blocks_by_rows(weights: Sequence[int], rows: int, size: int) -> list[list[int]]:
    """Blocks of `size` rows for each micro-batch, filled by rows."""
    if rows < size:
        minimum = "one row" if size == 1 else f"{size} rows"
        raise ValueError(f"A micro-batch needs at least {minimum}, not {rows}.")
    order = sorted(range(len(weights)), key=lambda block: -weights[block])
    step = rows // size
    return [order[start : start + step] for start in range(0, len(order), step)]


def _rows_of(blocks: Sequence[int], size: int) -> list[int]:
    rows: list[int] = []
    for block in blocks:
        rows += range(block * size, (block + 1) * size)
    return rows


def halved(micro: MicroBatching, lengths: Sequence[int]) -> MicroBatching | None:
    """Micro-batches of half the size; None where they are as small as they can be."""
    size = micro.rows_per_item
    if micro.max_tokens is not None:
        budget = max(_largest_item(lengths, size), min(micro.max_tokens, sum(lengths)) // 2)
        if budget >= micro.max_tokens:
            return None
        return dataclasses.replace(micro, max_tokens=budget)
    rows = max(size, min(micro.rows, len(lengths)) // 2 // size * size)
    if rows >= micro.rows:
        return None
    return dataclasses.replace(micro, rows=rows)


def _largest_item(lengths: Sequence[int], size: int) -> int:
    """Tokens of the largest `size` consecutive rows that stay together."""
    return max(sum(lengths[start : start + size]) for start in range(0, len(lengths), size))


def shard_rows(
    lengths: Sequence[int], world: int, *, rows_per_item: int = 1, prompts: Partition | None = None
) -> Partition:
    """Rows for each of `world` ranks, of nearly equal work. `rows_per_item` consecutive rows stay on one
    rank, and rows of each of the `prompts` if the work stays nearly equal. With fewer rows than ranks some
    get none."""
    if not lengths or len(lengths) % rows_per_item:
        raise ValueError(f"{len(lengths)} rows cannot be kept together by {rows_per_item}.")
    if prompts is not None and rows_per_item == 1 and world <= len(prompts) < len(lengths):
        each = workload(lengths)
        work = [int(each[rows].sum()) for rows in prompts]
        parts = balanced_partitions(work, world)
        if max(sum(work[block] for block in part) for part in parts) * world <= _UNEQUAL * sum(work):
            return [sorted(row for block in part for row in prompts[block]) for part in parts]
    costs = workload(lengths).reshape(-1, rows_per_item).sum(1).tolist()
    shards = [_rows_of(part, rows_per_item) for part in balanced_partitions(costs, min(world, len(costs)))]
    while len(shards) < world:
        shards.append([])
    return shards


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The tensors of `batch` on `device`. Token ids and prompt lengths stay: the model's inputs are laid out
    from them. Row numbers stay too: whoever reads them on the host would wait for the device."""
    moved: dict[str, Tensor] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        stays = field.metadata["role"] == LISTS or field.name in ("prompt_lengths", "row_ids")
        if isinstance(value, Tensor) and not stays:
            moved[field.name] = value.to(device, non_blocking=True)
    return batch.replace(**moved)


def sum_reports(reports: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """What a loss reported for each micro-batch, added up by name."""
    names = list(reports[0]) if reports else []
    if not names:
        return {}
    rows = torch.stack([torch.stack([report[name].float() for name in names]) for report in reports])
    return dict(zip(names, rows.double().sum(0).tolist(), strict=True))


# --- losses that are not finite -----------------------------------------------------------------------------


class NonFiniteLoss(ValueError):
    """A loss that is not finite, found before it reaches the weights. Carries the rows (`row_ids` of the
    batch, or positions) so that the trainer can write them down."""

    def __init__(self, rows: list[int], causes: list[str], loss: float, ranks: Sequence[int] = ()):
        self.rows = rows
        self.causes = causes
        self._arguments = rows, causes, loss, ranks
        where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
        why = " All that the loss is computed from is finite there: the loss function made it."
        if causes:
            why = f" Not finite in them: {', '.join(causes)}."
        shown = ", ".join(map(str, rows[:16]))
        if len(rows) > 16:
            shown += f" and {len(rows) - 16} more"
        super().__init__(f"The loss{where} is {loss} because of rows {shown}.{why} This update was not made.")

    def __reduce__(self) -> tuple[type[NonFiniteLoss], tuple[object, ...]]:
        return NonFiniteLoss, self._arguments


def suspects(batch: Batch, outputs: Mapping[str, Tensor]) -> tuple[list[int], list[str]]:
    """Positions of rows with a number that is not finite, in the batch or in the model's outputs, and the
    names of those tables."""
    tables: dict[str, Tensor | None] = {}
    for field in dataclasses.fields(batch):
        if field.metadata["role"] in (TOKENS, ROWS):
            tables[field.name] = getattr(batch, field.name)
    tables.update(outputs)
    bad = torch.zeros(len(batch), dtype=torch.bool)
    causes = []
    for name, table in tables.items():
        if table is None or not table.is_floating_point() or table.dim() == 0:
            continue
        strange = ~table.detach().cpu().isfinite()
        if table.dim() > 2:
            strange = strange.flatten(2).all(-1)  # -inf: a token that the model does not have
        if strange.dim() == 2:
            rows = (strange & (batch.mask.cpu() != 0)).any(-1)
        else:
            rows = strange
        if rows.any():
            causes.append(name)
            bad |= rows
    return bad.nonzero().squeeze(1).tolist(), causes


# --- out of memory ------------------------------------------------------------------------------------------


class OutOfMemoryOnRanks(torch.OutOfMemoryError):
    """Some ranks were out of memory, and all ranks know it."""

    def __init__(self, ranks: list[int]):
        super().__init__(f"out of memory on rank {', '.join(map(str, ranks))}")
        self.ranks = ranks


class OutOfMemoryInPlace(torch.OutOfMemoryError):
    """A rank was out of memory, and it knows which part of the model it has and what may make room."""

    def __init__(self, place: str, tokens: int, remedies: str):
        """`tokens` of the largest micro-batch that it had begun."""
        super().__init__(f"out of memory in {place}")
        self.place = place
        self.tokens = tokens
        self.remedies = remedies


class OomRetry:
    """Retries a pass that was out of memory: as it is after others released memory, else with micro-batches
    of half the size. Remembers the sizes that did not fit, so that a step fails once and not every time."""

    def __init__(
        self, ranks: Ranks | None = None, release_memory: Callable[[], bool] = nothing_to_release
    ) -> None:
        """`release_memory` makes others release device memory, and says whether they did."""
        self.count = 0
        self._ranks = ranks or Ranks()
        self._release_memory = release_memory
        self._fits: dict[MicroBatching, MicroBatching] = {}

    def run(
        self,
        micro: MicroBatching,
        lengths: Sequence[int],
        attempt: Callable[[MicroBatching], Result],
        *,
        again: bool = True,
    ) -> Result:
        """What `attempt` returns, with `micro` or as much smaller as it takes. With `again` false the first
        OOM is an error, and so is one that other ranks do not know of: they are in the middle of a collective
        and cannot start over."""
        wanted = micro
        micro = self._remembered(wanted, lengths)
        while True:
            try:
                return attempt(micro)
            except torch.OutOfMemoryError as error:
                micro = self._after(error, wanted, micro, lengths, again)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _remembered(self, wanted: MicroBatching, lengths: Sequence[int]) -> MicroBatching:
        """`wanted`, or the smaller size that was found for it. A later batch may have a longer row than the
        one that it was found for: the budget is never below that row."""
        found = self._fits.get(wanted)
        if found is None:
            return wanted
        if wanted.max_tokens is None or found.max_tokens is None:
            return found
        needed = max(found.max_tokens, _largest_item(lengths, wanted.rows_per_item))
        return dataclasses.replace(found, max_tokens=min(needed, wanted.max_tokens))

    def _after(
        self,
        error: torch.OutOfMemoryError,
        wanted: MicroBatching,
        micro: MicroBatching,
        lengths: Sequence[int],
        again: bool,
    ) -> MicroBatching:
        """The micro-batches of the next attempt; refuses where there can be none."""
        if isinstance(error, OutOfMemoryOnRanks):
            short = error.ranks
            known_to_all = True
        else:
            short = [self._ranks.rank]
            known_to_all = self._ranks.world == 1
        may_retry = again and known_to_all
        if may_retry and self._released():
            return micro
        smaller = halved(micro, lengths)
        if smaller is None or not may_retry:
            raise ValueError(self._advice(micro, smaller, short, error)) from error
        log.warning("%s The run continues with the smaller size.", self._advice(micro, smaller, short, error))
        self.count += 1
        self._fits[wanted] = smaller
        return smaller

    def _released(self) -> bool:
        """Whether any rank released memory: the same answer on all ranks."""
        released = any(self._ranks.all_gather_object(self._release_memory()))
        if released:
            log.info("Out of memory: the rollout engine released the KV cache that it had kept.")
        return released

    def _advice(
        self,
        micro: MicroBatching,
        smaller: MicroBatching | None,
        short: Sequence[int],
        error: torch.OutOfMemoryError,
    ) -> str:
        who = "The device"
        if self._ranks.world > 1:
            who = f"Rank {', '.join(map(str, short))} of {self._ranks.world}"
        largest = ""
        remedies = "model.enable_gradient_checkpointing, fsdp_config.optimizer_offload, or more devices"
        if isinstance(error, OutOfMemoryInPlace):
            who += f" ({error.place})"
            largest = f" (the largest has {error.tokens} tokens)"
            remedies = error.remedies
        if smaller is None:
            return (
                f"{who} is out of memory with micro-batches of one row{largest}. Use shorter sequences, "
                f"{remedies}."
            )
        if micro.max_tokens is not None:
            return (
                f"{who} is out of memory with micro-batches of {micro.max_tokens} tokens{largest}. Set the "
                f"*_max_token_len_per_gpu of this role to {smaller.max_tokens}."
            )
        return (
            f"{who} is out of memory with micro-batches of {micro.rows} rows{largest}. Set the "
            f"*_micro_batch_size_per_gpu of this role to {smaller.rows}."
        )
