"""Hashes of the beginnings of a sequence, by which others that begin alike are found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

BLOCK = 16
"""Tokens per hash of a prefix."""
_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
_ADAPTER_BASE = 0xD6E8FEB86659FD93


@cache
def _powers(size: int) -> np.ndarray:
    return np.cumprod(np.full(size, _HASH_BASE), dtype=np.uint64)


def prefix_hashes(tokens: Sequence[int]) -> np.ndarray:
    """Hashes of the first 1, 2, 3 ... tokens."""
    powers = _powers(1 << len(tokens).bit_length())[: len(tokens)]
    values = np.array(tokens, dtype=np.uint64) + np.uint64(1)
    return np.cumsum(values * powers, dtype=np.uint64)


def block_hashes(tokens: Sequence[int], adapter: int = 0) -> list[int]:
    """Hashes of the first 16, 32, 48 ... tokens, under one adapter."""
    sums = prefix_hashes(tokens[: len(tokens) // BLOCK * BLOCK])[BLOCK - 1 :: BLOCK]
    hashes: list[int] = (sums + np.uint64(adapter * _ADAPTER_BASE % (1 << 64))).tolist()
    return hashes
