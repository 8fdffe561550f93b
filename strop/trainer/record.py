"""What one step reports: numbers, and the seconds of each phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class StepRecord:
    """Metrics of one step. `phase` is the only clock of the loop."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.current: str | None = None
        """The phase that is running, for whoever has to explain a hang."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.current = before

    def add(self, metrics: Mapping[str, float], prefix: str = "") -> None:
        self.metrics.update({f"{prefix}{name}": float(value) for name, value in metrics.items()})
