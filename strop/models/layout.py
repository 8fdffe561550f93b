"""Sequences as a model takes them: one packed row of all tokens, or one padded row per sequence.

What a causal model says about a token depends on the tokens before it alone. So where sequences begin alike (the samples of a
prompt, answers that part late, a system prompt) a packed row holds the common beginning once, and every sequence finds its own
tokens by their places in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.attention import Packing, packing

NOTHING = -1
"""Stands behind the end of a sequence."""


@dataclass(frozen=True)
class Inputs:
    ids: Tensor
    positions: Tensor
    mask: Tensor | None
    """None when packed."""
    packing: Packing | None
    places: Tensor
    """[B, longest] where the tokens of each sequence stand in the flattened ids; NOTHING behind its end."""


def lay_out(table: Tensor, *, packed: bool, share: bool = True, device: torch.device | str = "cpu") -> Inputs:
    """The inputs for sequences in the rows of `table` (see `rectangle`). With `share` a packed row holds no beginning twice."""
    real = table != NOTHING
    columns = torch.arange(table.shape[1]).expand_as(table)
    if not packed:
        places = torch.where(real, torch.arange(table.numel()).view_as(table), NOTHING)
        return Inputs(table.clamp(min=0).to(device), columns.to(device), real.long().to(device), None, places)
    order = torch.arange(len(table))
    new = real
    if share:
        order = _alphabetical(table)
        table, real = table[order], real[order]
        new = real & _parted(table)
    # A token that is not new stands where the nearest row above has a new one; places grow downwards.
    sorted_places = torch.where(new, new.flatten().cumsum(0).view_as(table) - 1, NOTHING).cummax(0).values
    sorted_places = sorted_places.where(real, NOTHING)
    # A sequence without a new token is the beginning of another and need not attend by itself.
    layout = packing(sorted_places[new.any(1)], device)
    places = torch.empty_like(sorted_places).index_copy_(0, order, sorted_places)
    return Inputs(table[new][None].to(device), columns[new][None].to(device), None, layout, places)


def rectangle(sequences: Sequence[Tensor]) -> Tensor:
    """Token ids as [B, longest], with NOTHING behind the end of each sequence."""
    lengths = torch.tensor([sequence.shape[0] for sequence in sequences])
    table = torch.full((len(lengths), int(lengths.max())), NOTHING)
    table[torch.arange(table.shape[1]) < lengths[:, None]] = torch.cat(list(sequences))
    return table


def _alphabetical(table: Tensor) -> Tensor:
    """An order of the rows in which those that begin alike are neighbours, and a beginning of another row comes after it."""
    names = [row.tobytes() for row in table.numpy()]
    return torch.tensor(sorted(range(len(names)), key=names.__getitem__))


def _parted(table: Tensor) -> Tensor:
    """[B, longest] whether a row has left the row above at this column or before it."""
    different = torch.ones_like(table, dtype=torch.bool)
    different[1:] = table[1:] != table[:-1]
    return different.cummax(1).values
