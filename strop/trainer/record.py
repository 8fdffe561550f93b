"""What one step reports: numbers, and the seconds of each phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext


class StepRecord:
    """Metrics of one step. `phase` is the only clock of the loop."""

    def __init__(
        self,
        on_phase: Callable[[str | None], None] | None = None,
        around: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """`on_phase` is told of every phase that begins, and of the one (or None) that goes on when it ends; each phase runs
        inside `around`, whose own time does not count."""
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.current: str | None = None
        """The phase that is running, for whoever has to explain a hang."""
        self._on_phase, self._around = on_phase, around

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.current
        self._enter(name)
        with self._around(name), self._clock(name):
            yield
        self._enter(before)  # not after an error: whoever asks then wants to know where it came from

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _enter(self, name: str | None) -> None:
        self.current = name
        if self._on_phase is not None:
            self._on_phase(name)

    def add(self, metrics: Mapping[str, float], prefix: str = "") -> None:
        self.metrics.update({f"{prefix}{name}": float(value) for name, value in metrics.items()})
