"""What the rules of health look at, in as little memory for the millionth step as for the first, and what they say."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

FIRST, LAST, WINDOW, COURSE = 10, 32, 5, 256
"""Values kept from the beginning and from the end; steps that a median is taken over; points of the whole course."""

SETTLED = 10
"""Steps before anything is compared with the beginning."""


@dataclass(frozen=True)
class Sight:
    """What a rule saw: in words, and the numbers it went by."""

    message: str
    values: dict[str, float]


class Series:
    """The finite values of one metric."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=LAST)
        self.low, self.high = math.inf, -math.inf
        self.best: float | None = None
        """The highest median of WINDOW neighbouring values so far."""
        self.course: list[float] = []
        """Values at even distances from the first to the latest."""
        self._count, self._stride = 0, 1

    def add(self, value: float) -> None:
        if len(self.first) < FIRST:
            self.first.append(value)
        self.last.append(value)
        self.low, self.high = min(self.low, value), max(self.high, value)
        if len(self.last) >= WINDOW:
            now = self.recent(WINDOW)
            self.best = now if self.best is None or (now is not None and now > self.best) else self.best
        if self._count % self._stride == 0:
            self.course.append(value)
            if len(self.course) > COURSE:
                self.course, self._stride = self.course[::2], 2 * self._stride
        self._count += 1

    def recent(self, over: int) -> float | None:
        assert over <= LAST
        return median(list(self.last)[-over:]) if len(self.last) >= over else None


class History:
    """The series of all metrics that this step has a value of."""

    def __init__(self) -> None:
        self.step = 0
        self.steps = 0
        """Training steps seen."""
        self._series: dict[str, Series] = {}
        self._latest: dict[str, int] = {}

    def add(self, metrics: Mapping[str, object], step: int) -> None:
        self.step = step
        self.steps += "timing_s/step" in metrics
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._series.setdefault(name, Series()).add(float(value))
                self._latest[name] = step

    def series(self, name: str) -> Series | None:
        """None where the metric has no value in this step."""
        return self._series[name] if self._latest.get(name) == self.step else None

    def names(self, prefix: str, suffix: str = "") -> Iterator[str]:
        return (name for name in self._series if name.startswith(prefix) and name.endswith(suffix))

    def last(self, name: str, count: int) -> list[float]:
        """The latest values, at most `count` of them."""
        series = self.series(name)
        return [] if series is None else list(series.last)[-count:]

    def recent(self, name: str, over: int = WINDOW) -> float | None:
        """Median of the latest `over` values: one odd step moves nothing. None until there are as many."""
        series = self.series(name)
        return None if series is None else series.recent(over)

    def first(self, name: str) -> float | None:
        """Median of the first WINDOW values."""
        series = self.series(name)
        return median(series.first[:WINDOW]) if series is not None and len(series.first) >= WINDOW else None

    def best(self, name: str) -> float | None:
        series = self.series(name)
        return None if series is None else series.best

    def course(self, name: str) -> list[float]:
        series = self.series(name)
        return [] if series is None else series.course

    def range(self, low: str, high: str) -> tuple[float, float] | None:
        """Lowest of one metric and highest of another so far."""
        lowest, highest = self.series(low), self.series(high)
        return None if lowest is None or highest is None else (lowest.low, highest.high)
