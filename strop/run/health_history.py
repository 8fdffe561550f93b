"""What the rules of health look at: the course of every metric, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median


class History:
    """Finite values of each metric in the order of steps, those of the training steps alone unless named otherwise."""

    def __init__(self) -> None:
        self.step = 0
        self.steps = 0
        """Training steps seen."""
        self._series: dict[str, list[float]] = {}
        self._latest: dict[str, int] = {}

    def add(self, metrics: Mapping[str, object], step: int) -> None:
        self.step = step
        self.steps += "timing_s/step" in metrics
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._series.setdefault(name, []).append(float(value))
                self._latest[name] = step

    def of(self, name: str, last: int | None = None) -> list[float]:
        """All values, or the `last` ones; nothing where the metric has no value in this step."""
        if self._latest.get(name) != self.step:
            return []
        values = self._series[name]
        return values if last is None else values[-last:]

    def names(self, prefix: str, suffix: str = "") -> Iterator[str]:
        return (name for name in self._series if name.startswith(prefix) and name.endswith(suffix))

    def recent(self, name: str, over: int = 5) -> float | None:
        """Median of the latest `over` values: one odd step moves nothing. None until there are as many."""
        values = self.of(name, over)
        return median(values) if len(values) == over else None

    def first(self, name: str, over: int = 5) -> float | None:
        """Median of the first `over` values."""
        values = self.of(name)
        return median(values[:over]) if len(values) >= over else None

    def best(self, name: str, over: int = 5) -> float | None:
        """The highest median of `over` neighbouring values so far."""
        values = self.of(name)
        return max((median(values[i : i + over]) for i in range(len(values) - over + 1)), default=None)

    def range(self, low: str, high: str) -> tuple[float, float] | None:
        """Lowest of one metric and highest of another so far."""
        lows, highs = self.of(low), self.of(high)
        return (min(lows), max(highs)) if lows and highs else None
