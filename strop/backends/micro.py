"""Cutting a batch into micro-batches, and bringing each to its device. The order and the size never change a result."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from strop.backends.base import MicroBatching
from strop.data.balance import Partition, micro_batches
from strop.types import LISTS, Batch


def partition(batch: Batch, micro: MicroBatching) -> Partition:
    """Row numbers of each micro-batch. Rows of similar length share one, longest first: a lack of memory shows at once."""
    lengths = batch.lengths
    if not lengths:
        raise ValueError("The batch is empty; there is nothing to compute.")
    if micro.max_tokens is not None:
        parts = micro_batches(lengths, micro.max_tokens)
    else:
        if micro.rows < 1:
            raise ValueError(f"A micro-batch needs at least one row, not {micro.rows}.")
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        parts = [order[at : at + micro.rows] for at in range(0, len(order), micro.rows)]
    return [sorted(part, key=lambda row: -lengths[row]) for part in parts]


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The tensors of `batch` on `device`; token ids and prompt lengths stay, the model's inputs are laid out from them."""
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor) and field.metadata["role"] != LISTS and field.name != "prompt_lengths":
            moved[field.name] = value.to(device, non_blocking=True)
    return batch.replace(**moved)
