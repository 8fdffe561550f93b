"""From rendered rows to a Batch: the prompt is what stands before the first taught token, the response ends with the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.data.chat import Rendered
from strop.data.supervised import Pair
from strop.types import Batch, rows


@dataclass
class PairBatch(Batch):
    """Pairs as rows: a chosen answer, then the rejected one of the same pair."""

    margins: Tensor | None = rows()
    """How much better the chosen answer of the pair is."""
    reference: Tensor | None = rows()
    """The reference's log-prob of each answer, summed over its taught tokens."""


def conversations(items: Sequence[Rendered]) -> Batch:
    """Rows with at least one taught token. What follows the last one (a template's newline) teaches nothing and is cut off."""
    return Batch(**_fields(items))


def pairs(items: Sequence[Pair]) -> PairBatch:
    fields = _fields([side for pair in items for side in (pair.chosen, pair.rejected)])
    margins = torch.tensor([pair.margin for pair in items for _ in range(2)])
    known = [pair.reference for pair in items if pair.reference is not None]
    assert len(known) in (0, len(items)), "the reference knows all pairs of a batch or none"
    reference = torch.tensor(known, dtype=torch.float32).flatten() if known else None
    return PairBatch(**fields, margins=margins, reference=reference)


def teaches(item: Any) -> bool:
    """Whether anything is left to learn from a row after it was cut to its limit."""
    if item is None:
        return False
    if isinstance(item, Pair):
        return any(item.chosen.mask) and any(item.rejected.mask) and item.chosen.ids != item.rejected.ids
    return any(item.mask[1:])  # the first token of a text is predicted by nothing


def _fields(items: Sequence[Rendered]) -> dict[str, Any]:
    begins = [max(1, item.mask.index(1)) for item in items]
    ends = [len(item.mask) - item.mask[::-1].index(1) for item in items]
    mask = torch.zeros(len(items), max(end - begin for begin, end in zip(begins, ends)))
    for row, (item, begin, end) in enumerate(zip(items, begins, ends)):
        mask[row, : end - begin] = torch.tensor(item.mask[begin:end], dtype=torch.float32)
    return {
        "sequences": [torch.tensor(item.ids[:end], dtype=torch.long) for item, end in zip(items, ends)],
        "prompt_lengths": torch.tensor(begins),
        "mask": mask,
        "groups": torch.arange(len(items)),
        "row_ids": torch.arange(len(items)),
    }
