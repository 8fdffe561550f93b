"""The metrics history that health rules read, in constant memory, and the rules about time and memory of
steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from strop.config.schema.model import FsdpConfig

FIRST = 10
"""Values kept from the beginning."""
LAST = 32
"""Values kept from the end."""
WINDOW = 5
"""Values that a median is taken over."""
COURSE = 256
"""Points kept of the whole course."""

GAINED = 0.1
"""Share of the range of scores that counts as a rise."""
SETTLED = 10
"""Steps before a metric is compared with its beginning."""


@dataclass(frozen=True)
class RuleFinding:
    """What a rule found: a message, and the values that it is based on."""

    message: str
    values: dict[str, float]


class Series:
    """The finite values of one metric."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=LAST)
        self.low = math.inf
        self.high = -math.inf
        self.best: float | None = None
        """The highest median of WINDOW consecutive values so far."""
        self.course: list[float] = []
        """Evenly spaced values from the first to the latest."""
        self._count = 0
        self._stride = 1

    def add(self, value: float) -> None:
        if len(self.first) < FIRST:
            self.first.append(value)
        self.last.append(value)
        self.low = min(self.low, value)
        self.high = max(self.high, value)
        if len(self.last) >= WINDOW:
            now = median(list(self.last)[-WINDOW:])
            self.best = now if self.best is None else max(self.best, now)
        if self._count % self._stride == 0:
            self.course.append(value)
            if len(self.course) > COURSE:
                self.course = self.course[::2]
                self._stride *= 2
        self._count += 1

    def recent(self, over: int) -> float | None:
        """Median of the latest `over` values; None until there are as many."""
        assert over <= LAST
        if len(self.last) < over:
            return None
        return median(list(self.last)[-over:])


class History:
    """The series of all metrics; a query answers for metrics that the current step has a value of."""

    def __init__(self, precision: str = FsdpConfig.dtype) -> None:
        self.precision = precision
        """Of the engine that samples: that of the trained model, or "8 bits"."""
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
        """The values of a metric; None where it has no value in this step."""
        if self._latest.get(name) != self.step:
            return None
        return self._series[name]

    def names(self, prefix: str, suffix: str = "") -> Iterator[str]:
        """Metrics with this prefix and suffix."""
        for name in self._series:
            if name.startswith(prefix) and name.endswith(suffix):
                yield name

    def last(self, name: str, count: int) -> list[float]:
        """The latest values, at most `count` of them."""
        series = self.series(name)
        return [] if series is None else list(series.last)[-count:]

    def recent(self, name: str, over: int = WINDOW) -> float | None:
        """Median of the latest `over` values, which ignores a single outlier; None until there are as
        many."""
        series = self.series(name)
        return None if series is None else series.recent(over)

    def first(self, name: str) -> float | None:
        """Median of the first WINDOW values."""
        series = self.series(name)
        if series is None or len(series.first) < WINDOW:
            return None
        return median(series.first[:WINDOW])

    def best(self, name: str) -> float | None:
        """The highest median of WINDOW consecutive values."""
        series = self.series(name)
        return None if series is None else series.best

    def course(self, name: str) -> list[float]:
        """Evenly spaced values of the whole run."""
        series = self.series(name)
        return [] if series is None else series.course

    def range(self, low: str, high: str) -> tuple[float, float] | None:
        """(lowest value of one metric, highest value of another) so far."""
        lowest = self.series(low)
        highest = self.series(high)
        if lowest is None or highest is None:
            return None
        return lowest.low, highest.high


# ---- Scores as shares of their range ----


def reached(history: History) -> float | None:
    """The recent score as a share of the range of scores seen so far; None when all scores were the same."""
    now = history.recent("critic/score/mean")
    span = history.range("critic/score/min", "critic/score/max")
    if now is None or span is None or span[0] == span[1]:
        return None
    return (now - span[0]) / (span[1] - span[0])


def gained(history: History) -> float:
    """What the mean score has risen by, as a share of the range of scores."""
    now = history.recent("critic/score/mean")
    first = history.first("critic/score/mean")
    span = history.range("critic/score/min", "critic/score/max")
    if now is None or first is None or span is None or span[0] == span[1]:
        return 0.0
    return (now - first) / (span[1] - span[0])


def rising(history: History) -> bool:
    """Whether the latest scores are above those just before them, by a share of the range that counts."""
    scores = history.last("critic/score/mean", 2 * WINDOW)
    span = history.range("critic/score/min", "critic/score/max")
    if len(scores) < 2 * WINDOW or span is None:
        return False
    return median(scores[WINDOW:]) - median(scores[:WINDOW]) > GAINED * (span[1] - span[0])


# ---- Rules about the time and the memory of steps ----

IDLE_LIMIT = 0.6
IDLE_SECONDS = 0.5
"""Share of a step, and seconds of it, in which no model computes."""
GROWTH_GB = 0.5
GROWTH_SHARE = 0.3
"""How much a process may grow after its first steps, in GiB and as a share."""
STALL_FACTOR = 10.0
STALL_SECONDS = 30.0
"""A stalled phase takes this many times its usual seconds, and so many seconds more."""

COMPUTING = (
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "update",
)
"""Phases in which a model computes all the time."""


def idle_device(history: History) -> RuleFinding | None:
    """No model computes during a large share of a step."""
    step = history.recent("timing_s/step", SETTLED)
    if step is None or step <= 0:
        return None
    sampling = history.recent("timing_s/gen", SETTLED) or 0.0
    engine = history.recent("rollout/seconds", SETTLED)
    if engine is not None:  # in an agent's turn the engine waits for tools
        sampling = min(sampling, engine)
    busy = sampling + sum(history.recent(f"timing_s/{phase}", SETTLED) or 0.0 for phase in COMPUTING)
    idle = 1 - busy / step
    if idle < IDLE_LIMIT or idle * step < IDLE_SECONDS:
        return None
    reward = history.recent("timing_s/reward", SETTLED) or 0.0
    blame = "it waits for tools, data or the disk"
    if reward > idle * step / 2:
        blame = "most of it goes into scoring"
    return RuleFinding(
        f"No model computes in {idle:.0%} of a step of {step:.3g} s: {blame}.",
        {"idle": idle, "timing_s/reward": reward},
    )


def memory_growth(history: History) -> RuleFinding | None:
    """The process grows steadily."""
    held = history.course("perf/process_memory_gb")[SETTLED // 2 :]
    if len(held) < 2 * SETTLED:
        return None
    third = len(held) // 3
    early = median(held[:third])
    middle = median(held[third : 2 * third])
    late = median(held[2 * third : 3 * third])
    now = median(held[-SETTLED:])  # a save takes memory for a moment
    grown = now - early
    steady = late - middle > 0.5 * (middle - early) > 0
    if not steady or grown < GROWTH_GB or grown < GROWTH_SHARE * early:
        return None
    return RuleFinding(
        f"This process holds {now:.2f} GiB, {grown:.2f} more than after its first steps, and grows steadily.",
        {"perf/process_memory_gb": now, "first": early},
    )


def stalled_phase(history: History) -> RuleFinding | None:
    """A phase took much longer than usual."""
    for name in history.names("timing_s/"):
        if name.count("/") > 1 or name == "timing_s/step":  # a part of a phase, or all of them
            continue
        seconds = history.last(name, 21)
        if len(seconds) < SETTLED:
            continue
        usual = median(seconds[:-1])
        if seconds[-1] > STALL_FACTOR * usual and seconds[-1] > usual + STALL_SECONDS:
            phase = name.removeprefix("timing_s/")
            return RuleFinding(
                f"The phase {phase} took {seconds[-1]:.0f} s; {usual:.3g} s is usual.",
                {name: seconds[-1], "usual": usual},
            )
    return None
