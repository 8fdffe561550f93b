"""Rows with padding to packed rows and back, by indexing."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def index_first_axis(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return tensor[indices]


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Tokens under the mask, their places, the bounds of rows, the longest row, used tokens of each row."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    bounds = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[indices], indices, bounds, int(lengths.max()), used


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    rows = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return rows.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def rearrange(tensor: torch.Tensor, pattern: str, **axes: int) -> torch.Tensor:
    from einops import rearrange as by_einops

    return by_einops(tensor, pattern, **axes)
