"""Metrics of a run as columns in memory, and curves of them with no more points than a screen has."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from strop.board.tail import Tail

MOST_METRICS = 4000
LARGEST_STEP = 1 << 53
BLOCK = 256
"""Lines that are turned into columns at once."""


@dataclass
class Column:
    rows: array[int] = field(default_factory=lambda: array("i"))
    """Lines of the file in which the metric appears."""
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricFile:
    """metrics.jsonl, as far as it was read."""

    def __init__(self, path: Path):
        self.tail = Tail(path)
        self.lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.steps: array[int] = array("q")
        self.times: array[float] = array("d")
        self.columns: dict[str, Column] = {}
        self.size = 0

    def refresh(self) -> None:
        """Read what was added; call with the lock held."""
        if self.tail.replaced():
            self._clear()
        self.take(self.tail.new())

    def take(self, lines: Iterable[dict[str, Any]]) -> None:
        names: tuple[str, ...] = ()
        block: list[Iterable[Any]] = []
        for line in lines:
            step, time, data = line.get("step"), line.get("time"), line.get("data")
            if not isinstance(step, int) or abs(step) > LARGEST_STEP or not isinstance(data, dict):
                self.tail.damaged += 1
                continue
            if len(block) == BLOCK or names != tuple(data):
                self._add(names, block)
                names, block = tuple(data), []
            self.steps.append(step)
            self.times.append(math.nan if (when := _number(time)) is None else when)
            block.append(data.values())
        self._add(names, block)

    def _add(self, names: Sequence[str], block: Sequence[Iterable[Any]]) -> None:
        """The latest lines, which all have these metrics: by columns, because a million values one by one take seconds."""
        start = len(self.steps) - len(block)
        for name, values in zip(names, zip(*block)):
            column = self.columns.get(name)
            if column is None and len(self.columns) >= MOST_METRICS:
                continue
            rows: Iterable[int] = range(start, len(self.steps))
            if set(map(type, values)) != {float}:
                rows, values = _numbers(start, values)
            if values and column is None:
                column = self.columns[name] = Column()
            if column is not None:
                column.rows.extend(rows)
                column.values.extend(values)
                self.size += len(values)

    def curve(self, name: str, points: int) -> dict[str, list[Any]] | None:
        column = self.columns.get(name)
        if column is None:
            return None
        rows, values = np.array(column.rows), np.array(column.values)
        kept = downsample(values, points)
        rows = rows[kept]
        return {
            "step": np.array(self.steps)[rows].tolist(),
            "time": _finite(np.array(self.times)[rows]),
            "value": _finite(values[kept]),
        }

    def shares(self, names: Sequence[str], points: int) -> dict[str, dict[str, list[Any]]]:
        """Curves to put on top of each other: all at the same steps, each the mean over a stretch of lines, in which a metric
        that a line does not have counts as 0."""
        count = len(self.steps)
        edges = np.unique(np.linspace(0, count, min(points, count) + 1).astype(int))
        last, lengths = edges[1:] - 1, np.diff(edges)
        steps, times = np.array(self.steps)[last].tolist(), _finite(np.array(self.times)[last])
        found = {}
        for name in names:
            if name in self.columns:
                values = np.nan_to_num(np.array(self.columns[name].values))
                sums = np.bincount(np.searchsorted(last, np.array(self.columns[name].rows)), values, len(last))
                found[name] = {"step": steps, "time": times, "value": (sums / lengths).tolist()}
        return found

    def latest(self, name: str) -> float | None:
        column = self.columns.get(name)
        return column.values[-1] if column else None


def downsample(values: np.ndarray, points: int) -> np.ndarray:
    """Positions of at most `points` values that draw the same picture: the lowest and the highest of each stretch, so that no
    spike is lost. Where a stretch has a value that is no number, one such is kept too."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, points // 3) + 1).astype(int)
    kept = {0, count - 1}
    for start, end in pairwise(edges):
        piece = values[start:end]
        finite = np.isfinite(piece)
        if finite.any():
            kept.add(start + int(np.argmin(np.where(finite, piece, np.inf))))
            kept.add(start + int(np.argmax(np.where(finite, piece, -np.inf))))
        if not finite.all():
            kept.add(start + int(np.argmin(finite)))
    return np.array(sorted(kept))


def _numbers(start: int, values: Iterable[Any]) -> tuple[list[int], tuple[float, ...]]:
    """Lines, counted from `start`, whose value is a number or the name of one that JSON cannot write."""
    found = [(row, number) for row, value in enumerate(values, start) if (number := _number(value)) is not None]
    return [row for row, _ in found], tuple(number for _, number in found)


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _finite(values: np.ndarray) -> list[float | None]:
    """JSON has no NaN and no infinity: both are a gap in a curve."""
    return [value if finite else None for value, finite in zip(values.tolist(), np.isfinite(values).tolist())]


def curves(file: MetricFile, names: Sequence[str], points: int, *, stacked: bool = False) -> dict[str, Any]:
    if stacked:
        return file.shares(names, points)
    found = {name: file.curve(name, points) for name in names}
    return {name: curve for name, curve in found.items() if curve is not None}
