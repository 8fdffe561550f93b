"""Outputs of micro-batches, collected into tables of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from strop.models.layouts.routing import routing_of
from strop.types import Batch, pad_columns


def empty_tables(
    batch: Batch,
    want: Sequence[str],
    model: nn.Module | None,
    experts: tuple[int, int] | None = None,
    topk: int = 0,
) -> dict[str, Tensor]:
    """Zeros for the outputs named in `want`, except scalars. `experts`: layers with experts and experts of a
    token; None: those of `model`. `topk`: tokens of top_ids and top_log_probs."""
    tables: dict[str, Tensor] = {}
    for name in want:
        if name == "scores":
            tables[name] = torch.zeros(len(batch))
        elif name == "experts":
            if experts is None:
                assert model is not None
                experts = routing_of(model).shape
            read = max(1, max(batch.lengths) - 1)
            tables[name] = torch.zeros(len(batch), read, *experts, dtype=torch.int32)
        elif name in ("top_ids", "top_log_probs", "student_top_log_probs"):
            if name == "student_top_log_probs":
                assert batch.teacher_top_ids is not None
                topk = batch.teacher_top_ids.shape[2]
            dtype = torch.int32 if name == "top_ids" else torch.float32
            tables[name] = torch.zeros(*batch.mask.shape, topk, dtype=dtype)
        elif name != "auxiliary":
            tables[name] = torch.zeros(len(batch), batch.mask.shape[1])
    return tables


def write_rows(tables: Mapping[str, Tensor], name: str, rows: Sequence[int], found: Tensor) -> None:
    """Copy the output of a micro-batch of these rows into its table, if it has one."""
    table = tables.get(name)
    if table is None:
        return
    if name == "experts":
        table[list(rows), : found.shape[1]] = found.to(table.dtype).cpu()
    elif found.dim() >= 2:
        table[rows] = pad_columns(found, table.shape[1]).to(table.dtype).cpu()
    else:
        table[rows] = found.float().cpu()
