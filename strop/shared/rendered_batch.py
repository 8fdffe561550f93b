"""From rendered rows to a Batch: the prompt ends before the first trained token, the response ends with the
last trained token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from strop.data.chat import Rendered
from strop.types import Batch, Images


class BatchFields(TypedDict):
    """The fields of a Batch that every supervised row has."""

    sequences: list[Tensor]
    prompt_lengths: Tensor
    mask: Tensor
    groups: Tensor
    row_ids: Tensor
    images: list[Images] | None


def rendered_batch(items: Sequence[Rendered]) -> Batch:
    """The batch of rows that each have at least one trained token."""
    return Batch(**batch_fields(items))


def batch_fields(items: Sequence[Rendered]) -> BatchFields:
    """The tensors of the rows. Tokens after the last trained one (a newline of the template) are cut off."""
    begins: list[int] = []
    ends: list[int] = []
    for item in items:
        begins.append(max(1, item.mask.index(1)))
        ends.append(len(item.mask) - item.mask[::-1].index(1))
    mask = torch.zeros(len(items), max(end - begin for begin, end in zip(begins, ends)))
    sequences: list[Tensor] = []
    for row, (item, begin, end) in enumerate(zip(items, begins, ends)):
        mask[row, : end - begin] = torch.tensor(item.mask[begin:end], dtype=torch.float32)
        sequences.append(torch.tensor(item.ids[:end], dtype=torch.long))
    return {
        "sequences": sequences,
        "prompt_lengths": torch.tensor(begins),
        "mask": mask,
        "groups": torch.arange(len(items)),
        "row_ids": torch.arange(len(items)),
        "images": [item.images for item in items] if any(item.images for item in items) else None,
    }
