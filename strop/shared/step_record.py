"""What one step reports: metrics, the seconds of each phase, and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch


class StepRecord:
    """Metrics of one step. `phase` is the only clock of the loop."""

    def __init__(
        self,
        on_phase: Callable[[str | None], None] | None = None,
        around: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """`on_phase` is called with every phase that begins, and with the outer phase (or None) when it ends.
        Each phase runs inside `around`, whose own time does not count."""
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.current: str | None = None
        """The phase that is running."""
        self._on_phase = on_phase
        self._around = around

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time inside the block under `name`."""
        before = self.current
        self._enter(name)
        with self._around(name), self._clock(name):
            yield
        self._enter(before)  # not after an error: `current` then says where it happened

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
        """Add metrics under `prefix` and their names."""
        for name, value in metrics.items():
            self.metrics[f"{prefix}{name}"] = float(value)


GIB = 2**30


def memory_metrics() -> dict[str, float]:
    """Memory of the host, of this process and of its GPU, in GiB. GPU peaks are since the last call."""
    return {**_host_memory(), **_gpu_memory()}


def _host_memory() -> dict[str, float]:
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        known = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    except (OSError, ValueError, IndexError):  # no Linux
        return {}
    used = known["MemTotal"] - known["MemAvailable"]
    return {"perf/cpu_memory_used_gb": used / GIB, "perf/process_memory_gb": resident / GIB}


def _gpu_memory() -> dict[str, float]:
    # A query would initialize CUDA.
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    peaks = {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / GIB,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved() / GIB,
    }
    torch.cuda.reset_peak_memory_stats()
    return peaks
