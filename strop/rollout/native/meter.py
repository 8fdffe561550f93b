"""Counts what the native engine does: tokens, time, rows and memory, for the metrics of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from strop.host import host_memory

_STEP_COUNTERS = {"steps_to_8_rows": 8, "steps_to_64_rows": 64, "steps_to_256_rows": 256}
"""Decode steps are counted by their number of rows: up to each of these, and more."""
_SAFE_SHARE = 0.9
"""Share of the free memory that the cache may take."""
_HOST_FRACTION = 4
"""On a CPU the cache may take this fraction of the host's memory."""
_IDLE_FRACTION = 4
"""The cache stays during sleep() if at most this fraction of the device is allocated."""
_TAIL_FRACTION = 8
"""The tail: nothing waits, and at most this fraction of the largest number of rows runs."""


@dataclass(frozen=True)
class CacheUse:
    """What running and finished sequences hold of the cache."""

    tokens: int
    """Tokens of the running rows."""
    budget: int
    """Tokens that the cache may hold."""
    pages: int = 0
    """Pages that are not free."""


class Meter:
    """Counts tokens and time of the engine since the last reading."""

    def __init__(self) -> None:
        self.last_decode_seconds = 0.0
        self._reset()

    def _reset(self) -> None:
        self.tokens = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.continued_tokens = 0
        """Tokens that were not computed because states behind them were kept."""
        self.out_of_memory = 0
        self._computed_tokens = 0
        self._needed_tokens = 0
        self.memory_seconds = 0.0
        """Seconds in which answers were remembered, to guess from."""
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._tail_seconds = 0.0
        self._steps = 0
        self._row_steps = 0
        self._steps_by_rows = [0] * (len(_STEP_COUNTERS) + 1)
        self._max_rows = 0
        self._max_cache_use = 0.0
        self._max_tokens = 0
        self._max_pages = 0
        self._passes_with_drafts = 0
        self._drafted = 0
        self._accepted = 0

    @contextmanager
    def prefill(self, device: torch.device) -> Iterator[None]:
        """Time a prefill."""
        start = _now(device)
        yield
        self._prefill_seconds += _now(device) - start

    @contextmanager
    def decode(self, device: torch.device, rows: int, *, waiting: bool) -> Iterator[None]:
        """Time decode steps of so many rows."""
        start = _now(device)
        yield
        seconds = _now(device) - start
        self.last_decode_seconds = seconds
        self._decode_seconds += seconds
        self._max_rows = max(self._max_rows, rows)
        if not waiting and rows * _TAIL_FRACTION <= self._max_rows:
            self._tail_seconds += seconds

    def admitted(self, computed: int, needed: int) -> None:
        """Sequences of `needed` tokens were admitted, of which `computed` were not cached."""
        self._computed_tokens += computed
        self._needed_tokens += needed

    def decoded(self, steps: int, rows: int, use: CacheUse) -> None:
        """`steps` decode steps of `rows` rows ran."""
        self._steps += steps
        self._row_steps += steps * rows
        self._steps_by_rows[sum(rows > most for most in _STEP_COUNTERS.values())] += steps
        self._max_cache_use = max(self._max_cache_use, use.tokens / max(1, use.budget))
        self._max_tokens = max(self._max_tokens, use.tokens)
        self._max_pages = max(self._max_pages, use.pages)

    def speculated(self, passes: int, drafted: int, accepted: int) -> None:
        """So many decode steps guessed tokens: `drafted` ones, of which `accepted` were sampled."""
        self._passes_with_drafts += passes
        self._drafted += drafted
        self._accepted += accepted

    def read(self, max_num_seqs: int) -> dict[str, float]:
        """The numbers since the last reading."""
        seconds = self._prefill_seconds + self._decode_seconds + self.memory_seconds
        reuse = 0.0
        if self._needed_tokens:
            reuse = 1 - self._computed_tokens / self._needed_tokens
        numbers = {
            "tokens": float(self.tokens),
            "prompt_tokens": float(self._computed_tokens),
            "prefix_reuse": reuse,
            "seconds": seconds,
            "tokens_per_second": _ratio(self.tokens, seconds),
            "occupancy": _ratio(self._row_steps, self._steps * max_num_seqs),
            "rows_in_flight": float(self._max_rows),
            "cache_use": self._max_cache_use,
            "tokens_in_flight": float(self._max_tokens),
            "pages_used": float(self._max_pages),
            "prefill_share": _ratio(self._prefill_seconds, seconds),
            "tail_seconds": self._tail_seconds,
            "preemptions": float(self.preemptions),
            "recomputed_tokens": float(self.recomputed_tokens),
            "continued_tokens": float(self.continued_tokens),
            "out_of_memory": float(self.out_of_memory),
            "speculation/share_of_steps": _ratio(self._passes_with_drafts, self._steps),
            "speculation/memory_seconds": self.memory_seconds,
            "speculation/drafted": float(self._drafted),
            "speculation/accepted": float(self._accepted),
            "speculation/wasted": float(self._drafted - self._accepted),
            "speculation/acceptance": _ratio(self._accepted, self._drafted),
        }
        names = [*_STEP_COUNTERS, "steps_of_more_rows"]
        numbers.update(zip(names, map(float, self._steps_by_rows)))
        self._reset()
        return numbers


def _ratio(value: float, total: float) -> float:
    return value / total if total else 0.0


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --- memory -------------------------------------------------------------------------------------------------


def cache_memory(model: nn.Module, device: torch.device, share: float, held: int = 0, copies: int = 0) -> int:
    """Bytes for the cache, so that weights and cache together take `share` of the device; on a CPU, a quarter
    of the host. `held`: bytes that the cache already has; `copies`: bytes of quantised weights."""
    if device.type != "cuda":
        return host_memory() // _HOST_FRACTION
    free, total = torch.cuda.mem_get_info(device)
    # Memory that torch has reserved and does not use is available too.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) + held
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return max(0, int(min(free * _SAFE_SHARE, total * share - weights - copies)))


def may_stay(device: torch.device) -> bool:
    """Whether the cache may stay allocated during training: with it, at most a quarter of the device is
    allocated."""
    if device.type != "cuda":
        return False
    return torch.cuda.memory_allocated(device) * _IDLE_FRACTION <= torch.cuda.mem_get_info(device)[1]
