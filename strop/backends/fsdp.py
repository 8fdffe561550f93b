"""Training over many ranks with FSDP2: every rank holds a piece of each weight, gradient and optimizer moment.

All ranks are given the same batch. Each computes its share of the rows; what the model said, and what a loss reported, is then
known to all. So a caller sees what it would see on one device, and denominators counted over a batch are global by themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.backends.base import Loss, MicroBatching, Outputs
from strop.backends.fsdp_shard import SHARDS, Precision, make_meshes, shard
from strop.backends.lockstep import Lockstep, SharedLack
from strop.backends.micro import deal, on_device, partition
from strop.backends.optimizer import load_optimizer_state, make_optimizer, make_schedule
from strop.backends.parking import Parking
from strop.backends.scaling import LossScale
from strop.backends.sharded import ShardedWeights, fill, shard_like, whole
from strop.backends.single import SingleBackend, summed
from strop.backends.thrift import Thrift
from strop.config.schema.model import Fsdp, Optim
from strop.models.forward import head_is_plain
from strop.models.heads import HEAD
from strop.models.lora import has_adapters, merged_weights
from strop.models.parts import quicken
from strop.models.sequence_parallel import Slicing
from strop.models.tensor_parallel import parallelize
from strop.ranks import Ranks
from strop.types import Batch, pad_columns


class FsdpBackend(SingleBackend):
    """One model over the ranks of a run. Give the module with its weights, or hollow together with `fill_weights`."""

    def __init__(
        self,
        module: Any,
        *,
        ranks: Ranks,
        settings: Fsdp | None = None,
        optim: Optim | None = None,
        device: torch.device | str = "cpu",
        compute: torch.dtype = torch.float32,
        master: torch.dtype = torch.float32,
        reduce: torch.dtype = torch.float32,
        grad_clip: float | None = 1.0,
        temperature: float = 1.0,
        packed: bool = True,
        attention: str | None = None,
        offload_activations: bool = False,
        sequence_parallel: int = 1,
        tensor_parallel: int = 1,
        fill_weights: Any = None,
    ):
        """`sequence_parallel` ranks share each packed row, or `tensor_parallel` ranks each weight matrix.
        `fill_weights(module)` brings weights into a module that was made without them, once it is sharded."""
        self._refuse_half(optim, master)
        settings = settings or Fsdp()
        self.module, self.ranks, self.device = module, ranks, torch.device(device)
        self.thrift = Thrift(ranks)
        self.compute, self.temperature, self.grad_clip = compute, temperature, grad_clip
        self.scaling = LossScale() if compute == torch.float16 else None
        self.packed, self.attention, self.offload_activations = packed, attention, offload_activations
        refuse_both(sequence_parallel, tensor_parallel)
        self.slicing = None if sequence_parallel == 1 else sequence_slicing(ranks, sequence_parallel)
        self.mates = sequence_parallel * tensor_parallel
        if optim is None:
            module.requires_grad_(False)
        for name, weight in module.named_parameters():
            kept = weight.requires_grad or HEAD in name.split(".")[:-1]
            weight.data = weight.data.to(master if kept else compute)
        quicken(module, self.device, compute)
        meshes = make_meshes(self.device, ranks.world, settings.fsdp_size, tensor_parallel)
        if meshes.tensor is not None:
            parallelize(module, meshes.tensor)
        self.units: list[Any] = shard(module, meshes, settings, Precision(compute, reduce), master)
        alone = self.mates == 1 and meshes.whole.size() == meshes.whole[SHARDS].size()
        self.lockstep = Lockstep(self.units, counted=alone)
        if fill_weights is not None:
            fill_weights(module)
        self.weights = ShardedWeights(module, meshes.whole[SHARDS].get_group(), self.device)
        self.optimizer = None if optim is None else make_optimizer(self.weights.masters, optim)
        self.schedule = None if optim is None or self.optimizer is None else make_schedule(self.optimizer, optim)
        self.parking = Parking(self)  # what rests in host memory is up to `settings`
        self._look_at_the_head()

    # --- passes -----------------------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        self.module.eval()
        size = (len(batch), batch.mask.shape[1])
        tables = {name: torch.zeros(size[:1] if name == "scores" else size) for name in want if name != "auxiliary"}
        own, idle = self._share(batch, micro)

        def answer(rows: list[int]) -> None:
            for name, found in self._ask(batch.select(rows), want).items():
                if name in tables:
                    tables[name][rows] = (pad_columns(found, size[1]) if found.dim() == 2 else found).float().cpu()

        def nothing() -> None:
            self._ask(_shortest(batch), want)

        with torch.no_grad():
            for rows in own:
                self.lockstep.made(functools.partial(answer, rows), nothing)
            for _ in range(idle):
                nothing()
        self._reshard()
        self._share_lack()
        for table in tables.values():  # rows of other ranks are 0 here
            dist.all_reduce(table if self._speaks else table.zero_())
        return Outputs(**tables)

    def _forward_backward(self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching) -> dict[str, float]:
        self.module.train()
        own, idle = self._share(batch, micro)
        losses: list[Tensor] = []
        reports: list[dict[str, Tensor]] = []

        def learn(rows: list[int]) -> None:
            piece = batch.select(rows)
            with self._activations():
                outputs = Outputs(**self._ask(piece, want))
                value, sums = loss(outputs, on_device(piece, self.device))
            self._scaled(value).backward()
            losses.append(value.detach())
            reports.append({name: number.detach() for name, number in sums.items()})

        def nothing() -> None:
            asked = self._ask(_shortest(batch), want)
            sum((0.0 * found.sum() for found in asked.values()), torch.zeros(())).backward()

        for rows in own:
            self.lockstep.made(functools.partial(learn, rows), nothing)
        for _ in range(idle):
            nothing()
        self._share_lack()
        found = torch.stack(losses).float().tolist() if losses else []
        told = list(zip(own, found, strict=True)) if self._speaks else []
        passes = [(rank, *pair) for rank, pairs in enumerate(self.ranks.gather(told)) for pair in pairs]
        values = torch.tensor([value for _, _, value in passes])
        if not values.isfinite().all():
            self.weights.clear_gradients()
            failed = sorted({rank for rank, _, value in passes if not math.isfinite(value)})
            self._explain(batch, want, [rows for _, rows, _ in passes], values, failed)
        return self.ranks.summed(summed(reports) if self._speaks else {})

    def _share_lack(self) -> None:
        """If a rank did not have the memory for this call, all of them end it here."""
        lacking, self.lockstep.lacking = self.lockstep.lacking, False
        short = [rank for rank, lacks in enumerate(self.ranks.gather(lacking)) if lacks]
        if short:
            raise SharedLack(short)

    @property
    def _speaks(self) -> bool:
        """Of the ranks that work on the same rows, one tells what came out."""
        return self.ranks.rank % self.mates == 0

    def _share(self, batch: Batch, micro: MicroBatching) -> tuple[list[list[int]], int]:
        """The micro-batches of this rank, and how many passes over nothing it must add: gathering weights takes every rank."""
        size = 1 if self.slicing is None else self.slicing.size
        if micro.max_tokens is not None:
            micro = dataclasses.replace(micro, max_tokens=micro.max_tokens * size)  # each has its slice of them
        teams, own = self.ranks.world // self.mates, self.ranks.rank // self.mates
        rows = deal(batch.lengths, teams, together=micro.together)[own]
        parts = self.ranks.together(lambda: _partition(batch, rows, micro), "cutting the batch into micro-batches")
        return parts, max(self.ranks.gather(len(parts))) - len(parts)

    def _look_at_the_head(self) -> None:
        """Whether logits are a plain product is found out by a small pass, which must not come in the middle of another."""
        if not hasattr(self.module, HEAD):
            self.units[-1].unshard()
            self.module.eval()
            head_is_plain(self.module)
            self._reshard()

    def _reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    # --- weights ----------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """One unit is gathered at a time, so every rank must go through all of them. What is given out is a copy: the gathered
        weights are gone with the next unit."""
        places = {part: name for name, part in self.module.named_modules()}
        starts = [f"{places[unit]}." if places[unit] else "" for unit in self.units]
        for unit, start in zip(self.units, starts, strict=True):
            inner = tuple(other for other in starts if other != start and other.startswith(start))
            unit.unshard()
            for name, weight in self._named(start, inner):
                yield name, weight.clone()
            unit.reshard()

    def _named(self, start: str, without: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
        """Gathered weights by their Hugging Face names: those whose names begin with `start`, less the ones of inner units."""
        if has_adapters(self.module):
            yield from merged_weights(self.module, start=start, without=without)
            return
        for name, weight in self.module.named_parameters():
            if name.startswith(start) and not name.startswith(without):
                yield name, whole(weight.detach())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own, given = self.state_dict()["model"], state["model"]
        self._refuse_other(own, given)
        for name, target in own.items():
            fill(target, given[name])
        if self.optimizer is not None and "optimizer" in state:
            divided = {
                name: {key: _like_weight(value, self.weights.masters[name]) for key, value in remembered.items()}
                for name, remembered in state["optimizer"].items()
            }
            load_optimizer_state(self.optimizer, self.weights.masters, divided)
        self._load_progress(state)


def refuse_both(sequence_parallel: int, tensor_parallel: int) -> None:
    if min(sequence_parallel, tensor_parallel) > 1:
        raise ValueError(
            f"ulysses_sequence_parallel_size={sequence_parallel} and tensor_parallel_size={tensor_parallel}: ranks share rows "
            "or matrices, not both. Set one of them to 1."
        )


@functools.cache
def sequence_slicing(ranks: Ranks, size: int) -> Slicing:
    """Neighbouring ranks, `size` at a time, share rows."""
    if ranks.world % size:
        raise ValueError(
            f"ulysses_sequence_parallel_size={size} does not divide the {ranks.world} ranks (trainer.nnodes x "
            f"trainer.n_gpus_per_node). Set one of {[one for one in range(1, ranks.world + 1) if ranks.world % one == 0]}."
        )
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks.world, size)]
    return Slicing(groups[ranks.rank // size], ranks.rank % size, size)


def _partition(batch: Batch, rows: list[int], micro: MicroBatching) -> list[list[int]]:
    return [[rows[place] for place in part] for part in partition(batch.select(rows), micro)] if rows else []


def _shortest(batch: Batch) -> Batch:
    lengths = batch.lengths
    return batch.select([min(range(len(lengths)), key=lengths.__getitem__)])


def _like_weight(value: Any, weight: Tensor) -> Any:
    """What an optimizer remembers: divided as the weight is where it has a number for each of its numbers, else as it is."""
    if not hasattr(value, "shape"):
        return value
    if tuple(value.shape) == tuple(weight.shape):
        return shard_like(value, weight)
    return value if isinstance(value, Tensor) else value.read()
