"""One number from many: metrics of micro-batches and of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np


def reduction_of(name: str, *, compat: Literal["verl"] | None = None) -> str:
    """`max`, `min` or `mean`, read from the words of a metric's name.

    A word is what stands between slashes and underscores: `x/max` and `diff_max` are maxima, `admin` and
    `maximum_len` are not. `compat="verl"` looks for the letters anywhere.
    """
    found: Any = name if compat == "verl" else re.split(r"[/_]", name)
    return "max" if "max" in found else "min" if "min" in found else "mean"


def reduce_metrics(metrics: Mapping[str, Any], *, compat: Literal["verl"] | None = None) -> dict[str, Any]:
    """Reduce each list of values to one by `reduction_of` its name; what is not a list stays."""
    reduced = {}
    for name, values in metrics.items():
        if isinstance(values, Sequence | np.ndarray) and not isinstance(values, str):
            if len(values) == 0:
                continue
            values = getattr(np, reduction_of(name, compat=compat))(values).item()
        reduced[name] = values
    return reduced


def aggregate_over_ranks(values: Sequence[Sequence[float]], how: str) -> float:
    """One number from `values[rank][micro_batch]`.

    `sum` adds the micro-batches of a rank and averages the ranks: each rank's loss is already scaled by the
    number of ranks, as its gradient is averaged.
    """
    per_rank = [getattr(np, _known(how))(rank) for rank in values]
    if how == "mean" and len({len(rank) for rank in values}) > 1:
        return float(np.mean(np.concatenate([np.asarray(rank, dtype=float) for rank in values])))
    across = "mean" if how == "sum" else how
    return float(getattr(np, across)(per_rank))


def aggregate_rank(values: Sequence[float], how: str) -> float:
    """One number from the micro-batches of one rank."""
    return float(getattr(np, _known(how))(values))


def _known(how: str) -> str:
    if how not in ("mean", "sum", "min", "max"):
        raise ValueError(f"Metrics are aggregated by 'mean', 'sum', 'min' or 'max', not {how!r}.")
    return how
