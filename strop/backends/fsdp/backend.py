"""Training over many ranks with FSDP2: every rank holds a shard of each weight, gradient and optimizer
moment.

All ranks get the same batch. Each computes its share of the rows; outputs and reported sums are then gathered
by all. So a caller sees what it would see on one device, and denominators counted over a batch are global.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from strop.backends.base import BackendSettings, Loss, MicroBatching, Outputs
from strop.backends.fsdp.experts import divide_experts
from strop.backends.fsdp.lockstep import Lockstep
from strop.backends.fsdp.shard import SHARDS, Meshes, Precision, make_meshes, shard
from strop.backends.fsdp.sharded import ShardedWeights, whole
from strop.backends.micro_batches import OutOfMemoryOnRanks, rows_by_prompt, shard_rows, sum_reports
from strop.backends.output_tables import empty_tables, write_rows
from strop.backends.ranked import RankedBackend, partition_rows
from strop.config.schema.model import FsdpConfig
from strop.models.forward import head_is_plain
from strop.models.heads import HEAD
from strop.models.layouts.check import runs_packed
from strop.models.layouts.routing import end_routing, routings
from strop.models.lora import has_adapters, merged_weights
from strop.models.patches import patch_for_device
from strop.models.sequence_parallel import Slicing
from strop.models.tensor_parallel import parallelize
from strop.models.vision.passes import with_spare_image
from strop.ranks import Ranks
from strop.types import Batch


class FsdpBackend(RankedBackend):
    """One model over the ranks of a run. Give the module with its weights, or on the meta device together
    with `fill_weights`."""

    needs_ranks = True

    def __init__(
        self,
        module: Any,
        settings: BackendSettings | None = None,
        *,
        ranks: Ranks,
        fsdp: FsdpConfig | None = None,
        reduce: torch.dtype = torch.float32,
        sequence_parallel: int = 1,
        tensor_parallel: int = 1,
        fill_weights: Callable[[Any], None] | None = None,
    ):
        """`sequence_parallel` ranks share each packed row, or `tensor_parallel` ranks each weight matrix.
        Gradients are summed over ranks in `reduce`. `fill_weights(module)` loads the weights of a module on
        the meta device, once it is sharded."""
        settings = settings or BackendSettings()
        super().__init__(module, settings, ranks)
        refuse_both(sequence_parallel, tensor_parallel)
        if sequence_parallel > 1:
            runs_packed(module, True, sequence_parallel=True)
            self.slicing = sequence_slicing(ranks, sequence_parallel)
        self.ranks_per_row = sequence_parallel * tensor_parallel
        self._round_weights()
        patch_for_device(module, self.device, settings.compute, sequence_parallel)
        meshes = self._shard(fsdp or FsdpConfig(), reduce, tensor_parallel)
        one_copy = meshes.whole.size() == meshes.whole[SHARDS].size()
        alone = self.ranks_per_row == 1 and one_copy and meshes.experts is None
        self.lockstep = Lockstep(self.units, counted=alone)
        if fill_weights is not None:
            fill_weights(module)
        self.weights = ShardedWeights(module, meshes.whole[SHARDS].get_group(), self.device)
        self._make_optimizer()
        self._check_head()

    def _round_weights(self) -> None:
        """Trained weights and scalar heads rest in the master precision, all others in that of computing."""
        for name, weight in self.module.named_parameters():
            is_head = HEAD in name.split(".")[:-1]
            dtype = self.settings.compute
            if weight.requires_grad or is_head:
                dtype = self.settings.master
            weight.data = weight.data.to(dtype)

    def _shard(self, fsdp: FsdpConfig, reduce: torch.dtype, tensor_parallel: int) -> Meshes:
        meshes = make_meshes(self.device, self.ranks.world, fsdp, tensor_parallel)
        if meshes.tensor is not None:
            parallelize(self.module, meshes.tensor)
        if meshes.experts is not None:
            divide_experts(self.module, meshes.experts)
        precision = Precision(self.settings.compute, reduce)
        self.units: list[FSDPModule] = shard(self.module, meshes, fsdp, precision, self.settings.master)
        return meshes

    def _check_head(self) -> None:
        """Whether logits are a plain product is checked by a small pass, which must not come in the middle of
        another."""
        if not hasattr(self.module, HEAD):
            self.units[-1].unshard()
            self.module.eval()
            head_is_plain(self.module)
            self._reshard()

    # --- passes ---------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        self.module.eval()
        tables = empty_tables(batch, want, self.module, topk=self.settings.topk)
        own, idle = self._share(batch, micro)

        def answer(rows: list[int]) -> None:
            for name, found in self._outputs(_piece(batch, rows), want).items():
                write_rows(tables, name, rows, found)

        def nothing() -> None:
            self._outputs(_shortest(batch), want)

        with torch.no_grad():
            for rows in own:
                self.lockstep.run(functools.partial(answer, rows), nothing)
            for _ in range(idle):
                nothing()
        if self.module in routings:
            end_routing(self.module)
        self._reshard()
        self._share_out_of_memory()
        for table in tables.values():  # rows of other ranks are 0 here
            dist.all_reduce(table if self._reports else table.zero_())
        return Outputs(**tables)

    def _forward_backward(
        self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> dict[str, float]:
        self.module.train()
        own, idle = self._share(batch, micro)
        losses: list[Tensor] = []
        reports: list[dict[str, Tensor]] = []

        def learn(rows: list[int]) -> None:
            value, report = self._learn(_piece(batch, rows), want, loss)
            losses.append(value)
            reports.append(report)

        def nothing() -> None:
            outputs = self._outputs(_shortest(batch), want)
            sum((0.0 * found.sum() for found in outputs.values()), torch.zeros(())).backward()

        for rows in own:
            self.lockstep.run(functools.partial(learn, rows), nothing)
        for _ in range(idle):
            nothing()
        self._share_out_of_memory()
        self._refuse_losses(batch, want, own, losses)
        return self.ranks.all_reduce_sum(sum_reports(reports) if self._reports else {})

    def _share_out_of_memory(self) -> None:
        """If a rank was out of memory in this call, all ranks end it here."""
        mine = self.lockstep.out_of_memory
        self.lockstep.out_of_memory = False
        short = [rank for rank, lacks in enumerate(self.ranks.all_gather_object(mine)) if lacks]
        if short:
            raise OutOfMemoryOnRanks(short)

    @property
    def _reports(self) -> bool:
        """Of the ranks that work on the same rows, one reports the results."""
        return self.ranks.rank % self.ranks_per_row == 0

    def _share(self, batch: Batch, micro: MicroBatching) -> tuple[list[list[int]], int]:
        """The micro-batches of this rank, and how many passes over little it must add: every all-gather of
        weights takes every rank."""
        if micro.max_tokens is not None and self.slicing is not None:  # each rank has its slice of the tokens
            micro = dataclasses.replace(micro, max_tokens=micro.max_tokens * self.slicing.size)
        teams = self.ranks.world // self.ranks_per_row
        team = self.ranks.rank // self.ranks_per_row
        prompts = rows_by_prompt(batch)
        rows = shard_rows(batch.lengths, teams, rows_per_item=micro.rows_per_item, prompts=prompts)[team]
        parts = self.ranks.run_or_raise_on_all(
            lambda: partition_rows(batch, rows, micro), "cutting the batch into micro-batches"
        )
        return parts, max(self.ranks.all_gather_object(len(parts))) - len(parts)

    def _reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    # --- weights --------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by Hugging Face name, LoRA merged. One unit is gathered at a time, so every rank must go
        through all of them. Each weight is a copy: gathered weights are gone with the next unit."""
        places = {id(part): name for name, part in self.module.named_modules()}
        prefixes = []
        for unit in self.units:
            place = places[id(unit)]
            prefixes.append(f"{place}." if place else "")
        for unit, prefix in zip(self.units, prefixes, strict=True):
            inner = tuple(other for other in prefixes if other != prefix and other.startswith(prefix))
            unit.unshard()
            for name, weight in self._named(prefix, inner):
                yield name, weight.clone()
            unit.reshard()

    def _named(self, prefix: str, without: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
        """Gathered weights by their Hugging Face names: those whose names begin with `prefix`, less the ones
        of inner units."""
        if has_adapters(self.module):
            yield from merged_weights(self.module, start=prefix, without=without)
            return
        for name, weight in self.module.named_parameters():
            if name.startswith(prefix) and not name.startswith(without):
                yield name, whole(weight.detach())


def refuse_both(sequence_parallel: int, tensor_parallel: int) -> None:
    """Refuse sequence and tensor parallelism together."""
    if min(sequence_parallel, tensor_parallel) > 1:
        raise ValueError(
            f"ulysses_sequence_parallel_size={sequence_parallel} and tensor_parallel_size={tensor_parallel}: "
            "ranks share rows or matrices, not both. Set one of them to 1."
        )


@functools.cache
def sequence_slicing(ranks: Ranks, size: int) -> Slicing:
    """The process group of `size` neighbouring ranks that share rows."""
    if ranks.world % size:
        fitting = [one for one in range(1, ranks.world + 1) if ranks.world % one == 0]
        raise ValueError(
            f"ulysses_sequence_parallel_size={size} does not divide the {ranks.world} ranks (trainer.nnodes "
            f"x trainer.n_gpus_per_node). Set one of {fitting}."
        )
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks.world, size)]
    return Slicing(groups[ranks.rank // size], ranks.rank % size, size)


def _shortest(batch: Batch) -> Batch:
    lengths = batch.lengths
    return _piece(batch, [min(range(len(lengths)), key=lengths.__getitem__)])


def _piece(batch: Batch, rows: list[int]) -> Batch:
    return with_spare_image(batch.select(rows), batch)
