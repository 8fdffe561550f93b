"""Advantages brought to a common scale over all valid tokens of the batch."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from strop.algorithms.advantages.scan import row_chunks
from strop.algorithms.masked import EPS, Compat, as_weights

Normalisation = Literal["whiten", "population", "centre", "none"]


def normalise(advantages: Tensor, mask: Tensor, how: Normalisation, *, compat: Compat = None) -> Tensor:
    """Normalise over the tokens of `mask` (bool), whole batch at once.

    - "whiten": (A - mean) / sqrt(var + 1e-8), var with divisor n - 1 (verl)
    - "population": (A - mean) / sqrt(max(var, 1e-8)), var with divisor n (OpenRLHF)
    - "centre": A - mean
    - "none": A

    Exactly equal advantages, a single one among them, become exactly 0. Positions outside the mask must be 0 and stay so;
    with `compat` they may be anything and are shifted and scaled like the others, and "verl" refuses to whiten fewer than two
    tokens.
    """
    if how not in get_args(Normalisation):
        raise ValueError(f"normalisation must be one of {', '.join(get_args(Normalisation))}, got {how!r}.")
    if how == "none":
        return advantages
    count = int(mask.count_nonzero())
    if compat == "verl" and how == "whiten" and count < 2:
        raise ValueError(f"Whitening needs at least 2 valid tokens, the mask {tuple(mask.shape)} has {count}.")
    shifted, mean, squares = _centre(advantages, mask, count, keep_outside=compat is not None)
    if compat is None and _may_be_constant(squares / max(count, 1), mean, advantages.dtype) and _is_constant(advantages, mask):
        return torch.zeros_like(advantages)
    if how == "whiten":
        return shifted.mul_((squares / max(count - 1, 1) + EPS) ** -0.5)
    return shifted.mul_(max(squares / max(count, 1), EPS) ** -0.5) if how == "population" else shifted


def _centre(values: Tensor, mask: Tensor, count: int, *, keep_outside: bool) -> tuple[Tensor, float, float]:
    """Values less their mean over the mask, that mean, and the sum of squares of what is left.

    Values are 0 outside the mask and stay so, unless `keep_outside`: then they are anything there and are shifted too. A row is
    summed in the dtype of the values, rows are added up in float64.
    """
    weights = as_weights(mask, values.dtype) if keep_outside else None
    sums = (values if weights is None else values * weights).sum(dim=1)
    mean = float(sums.double().sum()) / max(count, 1)
    shifted, squares = torch.empty_like(values), 0.0
    for rows in row_chunks(values):
        here = torch.sub(values[rows], mean, out=shifted[rows])
        kept = here.mul_(as_weights(mask[rows], values.dtype)) if weights is None else here * weights[rows]
        squares += float(torch.linalg.vector_norm(kept, dim=1).double().square().sum())
    return shifted, mean, squares


def _may_be_constant(variance: float, mean: float, dtype: torch.dtype) -> bool:
    """A cheap test that lets the exact one run only when the spread is within rounding of the mean."""
    return variance**0.5 <= 64 * torch.finfo(dtype).eps * abs(mean)


def _is_constant(values: Tensor, mask: Tensor) -> bool:
    kept = values[mask]
    return not len(kept) or bool(kept.min() == kept.max())
