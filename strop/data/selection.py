"""Which rows of which files take part, in what order: mixtures, caps, shuffles. Row numbers in, row numbers out.

Everything is a function of a seed and of raw PCG64 output, whose stream NumPy promises never to change; so a resumed run
draws the same rows under another version of NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


def permutation(count: int, *, seed: int, stream: int = 0) -> Indices:
    """A random order of 0..count-1; each `stream` (an epoch, say) of a seed has its own."""
    keys = np.random.PCG64(np.random.SeedSequence([seed, stream])).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


def select(
    counts: Sequence[int], *, weights: Sequence[float] | None = None, most: int = -1, shuffle: bool = False, seed: int = 0
) -> Indices:
    """Rows of files with `counts` rows: all, or mixed by `weights`; then at most `most` of them."""
    rows = np.arange(sum(counts), dtype=np.int64) if weights is None else mixture(counts, weights, seed=seed)
    return subset(rows, most, shuffle=shuffle, seed=seed)


def subset(indices: Indices, most: int, *, shuffle: bool, seed: int) -> Indices:
    """At most `most` of the rows (-1: all): the first ones, or with `shuffle` a random choice; in their old order."""
    if most < 0 or most >= len(indices):
        return indices
    if not shuffle:
        return indices[:most]
    return indices[np.sort(permutation(len(indices), seed=seed, stream=1 << 32)[:most])]


def mixture(counts: Sequence[int], weights: Sequence[float], *, seed: int) -> Indices:
    """Rows of several files drawn in proportion to `weights`, until every file has been seen whole.

    Each draw picks a file by weight and takes its next row, from the top again after the last; so small files repeat and
    every row appears. A file of weight 0 is left out.
    """
    if len(weights) != len(counts):
        raise ValueError(f"data.prompt_probs has {len(weights)} weights for {len(counts)} files; give one per file.")
    shares = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(shares).all() or (shares < 0).any() or not shares.sum():
        raise ValueError(f"data.prompt_probs={list(weights)}: weights must be zero or more, and not all zero.")
    edges = np.cumsum(shares / shares.sum())
    edges[np.flatnonzero(shares)[-1] :] = 1.0  # whatever rounding says, no draw may land behind the last weight
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
        places = np.flatnonzero(drawn == file)
        if size:
            rows[places] = starts[file] + np.arange(len(places)) % size
            last = max(last, int(places[size - 1]))
    return rows[: last + 1]
