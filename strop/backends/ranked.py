"""What backends over many ranks share: losses that are not finite, and loading a state into shards."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.backends.base import MicroBatching, refuse_other_weights
from strop.backends.fsdp.sharded import RegionReader, fill, shard_like
from strop.backends.micro_batches import partition
from strop.backends.optimizer import load_optimizer_state
from strop.backends.single import ModuleBackend
from strop.types import Batch


class RankedBackend(ModuleBackend):
    """A backend whose ranks share the rows of a batch."""

    @property
    @abstractmethod
    def _reports(self) -> bool:
        """Of the ranks that work on the same rows, one reports the results."""

    def _refuse_losses(
        self, batch: Batch, want: Sequence[str], own: list[list[int]], losses: list[Tensor]
    ) -> None:
        """Raise on all ranks if a loss of any rank is not finite."""
        found = torch.stack(losses).float().tolist() if losses else []
        mine = list(zip(own, found, strict=True)) if self._reports else []
        rows: list[list[int]] = []
        values: list[float] = []
        failed: list[int] = []
        for rank, pairs in enumerate(self.ranks.all_gather_object(mine)):
            for part, value in pairs:
                rows.append(part)
                values.append(value)
                if not math.isfinite(value) and rank not in failed:
                    failed.append(rank)
        if failed:
            self.weights.clear_gradients()
            self._refuse_loss(batch, want, rows, torch.tensor(values), failed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`model` must name exactly the weights of this one; `optimizer` and `schedule` may be left out."""
        given = state["model"]
        refuse_other_weights(self.state_dict()["model"], given)
        self._fill_weights(given)
        if self.optimizer is not None and "optimizer" in state:
            sharded: dict[str, dict[str, object]] = {}
            for name, saved in state["optimizer"].items():
                master = self.weights.masters.get(name)
                if master is not None:
                    sharded[name] = {key: like_weight(value, master) for key, value in saved.items()}
            load_optimizer_state(self.optimizer, self.weights.masters, sharded)
        self._load_progress(state)

    def _fill_weights(self, given: Mapping[str, Tensor | RegionReader]) -> None:
        """Copy this rank's shards out of whole weights."""
        for name, target in self.state_dict()["model"].items():
            fill(target, given[name])


def partition_rows(batch: Batch, rows: list[int], micro: MicroBatching) -> list[list[int]]:
    """Micro-batches of these rows of a batch."""
    if not rows:
        return []
    return [[rows[place] for place in part] for part in partition(batch.select(rows), micro)]


def like_weight(value: Any, weight: Tensor) -> object:
    """A value of the optimizer state: sharded as the weight is where it has the weight's shape."""
    if not hasattr(value, "shape"):
        return value
    if tuple(value.shape) == tuple(weight.shape):
        return shard_like(value, weight)
    if isinstance(value, Tensor):
        return value
    saved: RegionReader = value
    return saved.read()
