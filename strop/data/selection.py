"""Select and order rows: mixtures of files, sample limits, shuffles; all as arrays of row indices.

Everything is a function of a seed and of raw PCG64 output, whose stream NumPy guarantees not to change; so a
resumed run draws the same rows with another version of NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def permutation(count: int, *, seed: int, stream: int = 0) -> Indices:
    """Return a random order of 0..count-1; each `stream` of a seed (for instance an epoch) has its own
    order."""
    keys = np.random.PCG64(np.random.SeedSequence([seed, stream])).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


def select(
    counts: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
    limit: int = -1,
    shuffle: bool = False,
    seed: int = 0,
) -> Indices:
    """Return rows of files with `counts` rows: all, or mixed by `weights`; then at most `limit` of them."""
    if weights is None:
        rows: Indices = np.arange(sum(counts), dtype=np.int64)
    else:
        rows = mixture(counts, weights, seed=seed)
    return subset(rows, limit, shuffle=shuffle, seed=seed)


def subset(indices: Indices, limit: int, *, shuffle: bool, seed: int) -> Indices:
    """Return at most `limit` rows (-1: all) in their order: the first ones, or with `shuffle` a random
    choice."""
    if limit < 0 or limit >= len(indices):
        return indices
    if not shuffle:
        return indices[:limit]
    return indices[np.sort(permutation(len(indices), seed=seed, stream=1 << 32)[:limit])]


def mixture(counts: Sequence[int], weights: Sequence[float], *, seed: int) -> Indices:
    """Return rows of several files, drawn in proportion to `weights`, until every row was drawn.

    Each draw picks a file by weight and takes its next row, starting again after its last one; so small files
    repeat. A file of weight 0 is not used.
    """
    if len(weights) != len(counts):
        raise ValueError(
            f"data.prompt_probs has {len(weights)} weights for {len(counts)} files; give one per file."
        )
    shares = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(shares).all() or (shares < 0).any() or not shares.sum():
        raise ValueError(
            f"data.prompt_probs={list(weights)}: weights must be zero or more, and not all zero."
        )
    edges = np.cumsum(shares / shares.sum())
    edges[np.flatnonzero(shares)[-1] :] = 1.0  # in spite of rounding, no draw may lie behind the last weight
    sizes = np.where(shares > 0, np.asarray(counts), 0)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    source = np.random.PCG64(np.random.SeedSequence([seed, 1 << 33]))
    drawn = np.zeros(0, dtype=np.int64)
    while (np.bincount(drawn, minlength=len(sizes)) < sizes).any():
        uniform = (source.random_raw(max(1024, len(drawn))) >> np.uint64(11)) * 2.0**-53
        drawn = np.concatenate([drawn, np.searchsorted(edges, uniform, side="right")])
    rows = np.zeros(len(drawn), dtype=np.int64)
    last = 0
    for file, size in enumerate(sizes):
        positions = np.flatnonzero(drawn == file)
        if size:
            rows[positions] = starts[file] + np.arange(len(positions)) % size
            last = max(last, int(positions[size - 1]))
    return rows[: last + 1]
