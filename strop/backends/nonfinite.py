"""A loss that is not a number: found before it reaches the weights, and traced to its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.types import ROWS, TOKENS, Batch


class NonFiniteLoss(ValueError):
    """Carries the rows (`row_ids` of the batch, or positions) so that the trainer can write them down."""

    def __init__(self, rows: list[int], causes: list[str], loss: float, ranks: Sequence[int] = ()):
        self.rows, self.causes = rows, causes
        self._made_of = rows, causes, loss, ranks
        where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
        why = f" Not finite in them: {', '.join(causes)}." if causes else ""
        shown = ", ".join(map(str, rows[:16])) + (f" and {len(rows) - 16} more" if len(rows) > 16 else "")
        super().__init__(f"The loss{where} is {loss} because of rows {shown}.{why} This update was not made.")

    def __reduce__(self) -> tuple[type[NonFiniteLoss], tuple[Any, ...]]:
        return NonFiniteLoss, self._made_of


def suspects(batch: Batch, outputs: Mapping[str, Tensor]) -> tuple[list[int], list[str]]:
    """Positions of rows with a number that is not finite, in the batch or in what the model said; and the names of those."""
    bad = torch.zeros(len(batch), dtype=torch.bool)
    causes = []
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.metadata["role"] in (TOKENS, ROWS)}
    for name, table in {**fields, **outputs}.items():
        if table is None or not table.is_floating_point() or table.dim() == 0:
            continue
        trained = (batch.mask.cpu() != 0) if table.dim() == 2 else torch.ones(len(batch), dtype=torch.bool)
        strange = ~table.detach().cpu().isfinite() & trained
        rows = strange.any(-1) if strange.dim() == 2 else strange
        if rows.any():
            causes.append(name)
            bad |= rows
    return bad.nonzero().squeeze(1).tolist(), causes
