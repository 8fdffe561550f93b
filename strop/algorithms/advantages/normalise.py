"""Advantages brought to a common scale over all valid tokens of the batch."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from strop.algorithms.masked import EPS, Compat

Normalisation = Literal["whiten", "population", "centre", "none"]


def normalise(advantages: Tensor, mask: Tensor, how: Normalisation, *, compat: Compat = None) -> Tensor:
    """Normalise over the tokens of `mask` (bool), whole batch at once.

    - "whiten": (A - mean) / sqrt(var + 1e-8), var with divisor n - 1 (verl)
    - "population": (A - mean) / sqrt(max(var, 1e-8)), var with divisor n (OpenRLHF)
    - "centre": A - mean
    - "none": A

    Exactly equal advantages, a single one among them, become exactly 0. Positions outside the mask become 0; with `compat` they
    are shifted and scaled like the others, and "verl" refuses to whiten fewer than two tokens.
    """
    if how not in get_args(Normalisation):
        raise ValueError(f"normalisation must be one of {', '.join(get_args(Normalisation))}, got {how!r}.")
    if compat is None:
        advantages = advantages.masked_fill(~mask, 0.0)
    if how == "none":
        return advantages
    count = int(mask.sum())
    if compat == "verl" and how == "whiten" and count < 2:
        raise ValueError(f"Whitening needs at least 2 valid tokens, the mask {tuple(mask.shape)} has {count}.")
    if not count:
        return advantages
    mean = advantages.masked_fill(~mask, 0.0).sum(dim=1).double().sum() / count
    shifted = advantages - mean.to(advantages.dtype)
    centred = shifted.masked_fill(~mask, 0.0)
    squares = torch.linalg.vector_norm(centred, dim=1).double().square().sum()
    if compat is None:
        if _may_be_constant(squares / count, mean, advantages.dtype) and _is_constant(advantages, mask):
            return torch.zeros_like(advantages)
        shifted = centred
    if how == "centre":
        return shifted
    scale = (squares / max(count - 1, 1) + EPS).rsqrt() if how == "whiten" else (squares / count).clamp(min=EPS).rsqrt()
    return shifted.mul_(scale.to(shifted.dtype))


def _may_be_constant(variance: Tensor, mean: Tensor, dtype: torch.dtype) -> bool:
    """A cheap test that lets the exact one run only when the spread is within rounding of the mean."""
    return bool(variance.sqrt() <= 64 * torch.finfo(dtype).eps * mean.abs())


def _is_constant(values: Tensor, mask: Tensor) -> bool:
    kept = values[mask]
    return bool(kept.min() == kept.max())
