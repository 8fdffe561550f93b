"""Histograms of scores and response lengths by step, from the samples that a run kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from strop.board.sample_file import DamagedSampleFile
from strop.board.sample_pages import SampleFolder

COLUMNS = ("score", "response_tokens")
MAX_STEPS = 60
"""Steps of one answer: all, or so many at even distances."""
BINS = 24
ALMOST_EQUAL = 1e-9
"""Of the larger of two numbers: a smaller difference is none."""


def histograms(samples: SampleFolder, split: str, seconds: float) -> dict[str, object]:
    """The steps that were read, and for each column the edges of its bins and the counts of each step.

    Bins are the same for all steps. Samples without a score are left out. Reading ends when the time is over.
    """
    steps = spaced(samples.steps().get(split, []), MAX_STEPS)
    deadline = time.monotonic() + seconds
    read: dict[int, Mapping[str, np.ndarray]] = {}
    damaged: list[str] = []
    left = len(steps)
    for step in steps:
        if read and time.monotonic() > deadline:
            break
        left -= 1
        try:
            read[step] = samples.numbers(split, step, COLUMNS)
        except DamagedSampleFile as error:
            damaged.append(str(error))
    found: dict[str, object] = {"steps": list(read), "damaged": damaged, "left": left}
    for name in COLUMNS:
        found[name] = counts([values[name] for values in read.values()])
    return found


def spaced(steps: Sequence[int], most: int) -> list[int]:
    """All steps, or `most` of them at even distances with the first and the last.

    >>> spaced(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(steps) <= most:
        return list(steps)
    places = np.linspace(0, len(steps) - 1, most).round().astype(int)
    return [int(steps[place]) for place in places]


def counts(rows: Sequence[np.ndarray]) -> dict[str, object]:
    """Edges of common bins, and the counts of each row in them."""
    finite = [row[np.isfinite(row)] for row in rows]
    everything = np.concatenate([*finite, np.zeros(0)])
    if not len(everything):
        return {"edges": [], "counts": [[] for _ in rows]}
    edges = bin_edges(float(everything.min()), float(everything.max()))
    return {"edges": edges.tolist(), "counts": [np.histogram(row, edges)[0].tolist() for row in finite]}


def bin_edges(low: float, high: float) -> np.ndarray:
    """Edges of BINS bins. Sums of rewards differ in their last digit: numbers that are almost equal get bins
    around them, as equal ones do."""
    size = max(abs(low), abs(high))
    if high - low <= ALMOST_EQUAL * size:
        margin = max(0.5, ALMOST_EQUAL * size)
        low, high = low - margin, high + margin
    shares = np.linspace(0, 1, BINS + 1)
    return low * (1 - shares) + high * shares
