"""Which sampling settings every engine can take: one that none can would fail all requests of a step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

SMALLEST = 1e-30
"""Logits divided by less are beyond float32."""
_LARGEST_ID = (1 << 31) - 1


class Settings(Protocol):
    """What `strop.rollout.base.Sampling` has."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def stop_ids(self) -> Collection[int]: ...


def check_sampling(sampling: Settings) -> None:
    """Raise ValueError for the first setting that is out of its bounds."""
    smallest = f"at least {SMALLEST:g}"
    greedy = sampling.temperature == 0
    for name, is_allowed, words in (
        ("temperature", greedy or sampling.temperature >= SMALLEST, f"0 (greedy) or {smallest}"),
        ("top_k", sampling.top_k % 1 == 0, "a whole number"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1 (temperature=0 is greedy)"),
        ("min_p", 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty >= SMALLEST, smallest),
        ("stop_ids", all(abs(token) <= _LARGEST_ID for token in sampling.stop_ids), "token ids"),
    ):
        if not is_allowed:
            raise ValueError(f"{name}={getattr(sampling, name)} must be {words}.")
