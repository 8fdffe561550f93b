"""What the engine did: tokens, time, how full it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Meter:
    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.tokens = self.preemptions = self.retreats = 0
        self._computed = self._needed = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self._steps = self._row_steps = 0
        self._fullest = 0.0

    @contextmanager
    def prefill(self, device: torch.device) -> Iterator[None]:
        start = _now(device)
        yield
        self._prefill_seconds += _now(device) - start

    @contextmanager
    def decode(self, device: torch.device) -> Iterator[None]:
        start = _now(device)
        yield
        self._decode_seconds += _now(device) - start

    def seated(self, computed: int, needed: int) -> None:
        """Sequences of `needed` tokens in all began, and only so many of these had to be computed."""
        self._computed += computed
        self._needed += needed

    def decoded(self, steps: int, rows: int, held: int, budget: int) -> None:
        self._steps += steps
        self._row_steps += steps * rows
        self._fullest = max(self._fullest, held / max(1, budget))

    def read(self, max_rows: int) -> dict[str, float]:
        """The numbers since the last reading."""
        seconds = self._prefill_seconds + self._decode_seconds
        numbers = {
            "tokens": float(self.tokens),
            "prompt_tokens": float(self._computed),
            "prefix_reuse": 1 - self._computed / self._needed if self._needed else 0.0,
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds if seconds else 0.0,
            "occupancy": self._row_steps / (self._steps * max_rows) if self._steps else 0.0,
            "cache_use": self._fullest,
            "prefill_share": self._prefill_seconds / seconds if seconds else 0.0,
            "preemptions": float(self.preemptions),
            "out_of_memory": float(self.retreats),
        }
        self._reset()
        return numbers


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
