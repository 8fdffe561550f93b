"""Select and order rows: mixtures of files, sample limits, shuffles; all as arrays of row indices.

Everything is a function of a seed and of raw PCG64 output, whose stream NumPy guarantees not to change; so a
resumed run draws the same rows with another version of NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strop.config.schema.data import DataConfig
from strop.config.schema.supervised import SupervisedDataConfig
from strop.data.files import FileRows, RowSource

Indices = NDArray[np.int64]
Split = Literal["train", "val"]
MAX_DRAWS = 1 << 27
"""Rows of an epoch of a mixture; more do not fit into memory."""


def select_rows(config: DataConfig | SupervisedDataConfig, rows: RowSource, split: Split) -> Indices:
    """Return the rows of a split: at most data.*_max_samples, and for training files mixed by
    data.prompt_probs."""
    limit = config.val_max_samples
    shuffle = isinstance(config, DataConfig) and config.validation_shuffle
    weights: Sequence[float] | None = None
    if split == "train":
        limit = config.train_max_samples
        shuffle = config.shuffle
        weights = config.prompt_probs
    counts = [len(rows)]
    if isinstance(rows, FileRows):
        counts = rows.counts
    else:
        weights = None
    indices = select(counts, weights=weights, limit=limit, shuffle=shuffle, seed=order_seed(config))
    if not len(indices):
        raise ValueError(f"data.{split}_max_samples={limit} leaves no rows. Set it to -1 for all of them.")
    return indices


def order_seed(config: DataConfig | SupervisedDataConfig) -> int:
    """Return data.seed, which follows trainer.seed; 0 if neither is set."""
    return config.seed if isinstance(config.seed, int) else 0


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
    rarest = int(np.argmax(np.divide(sizes, shares, out=np.zeros(len(shares)), where=shares > 0)))
    expected = sizes[rarest] * shares.sum() / shares[rarest]
    if expected > MAX_DRAWS:
        raise ValueError(
            f"data.prompt_probs={list(weights)}: until all {counts[rarest]} rows of file {rarest} are drawn, "
            f"an epoch has about {expected:.1e} rows. Raise its weight, or set it to 0."
        )
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
