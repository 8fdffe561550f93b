"""Rows of token ids brought to one width."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Truncation = Literal["left", "right", "middle", "error"]


def pad_or_truncate(
    token_ids: Tensor,
    attention_mask: Tensor,
    *,
    width: int,
    pad_id: int,
    pad_side: Literal["left", "right"] = "left",
    truncation: Truncation = "error",
) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, width]: short rows are padded on `pad_side`, long ones lose tokens as `truncation`
    says.

    "left" drops the first tokens, "right" the last, "middle" keeps the first width // 2 and fills up from the
    end.
    """
    if token_ids.shape != attention_mask.shape or token_ids.dim() != 2:
        raise ValueError(
            f"token_ids {tuple(token_ids.shape)} and attention_mask {tuple(attention_mask.shape)} must have "
            "one shape [B, T]."
        )
    length = token_ids.shape[1]
    if length < width:
        sides = (width - length, 0) if pad_side == "left" else (0, width - length)
        return pad(token_ids, sides, value=pad_id), pad(attention_mask, sides, value=0)
    if length == width:
        return token_ids, attention_mask
    kept = _kept_columns(length, width, truncation)
    return token_ids[:, kept], attention_mask[:, kept]


def strip_padding(token_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The ids of each row without its left padding."""
    lengths = attention_mask.sum(1).tolist()
    return [row[len(row) - length :] for row, length in zip(token_ids.tolist(), lengths)]


def _kept_columns(length: int, width: int, truncation: Truncation) -> Tensor:
    columns = torch.arange(length)
    if truncation == "left":
        return columns[length - width :]
    if truncation == "right":
        return columns[:width]
    if truncation == "middle":
        head = width // 2
        return torch.cat([columns[:head], columns[length - (width - head) :]])
    raise ValueError(
        f"Rows of {length} tokens do not fit into width={width} and truncation={truncation!r} allows no cut: "
        "raise the width, or set truncation to 'left', 'right' or 'middle'."
    )
