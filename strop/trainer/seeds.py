"""Seeds of independent random streams."""

from __future__ import annotations


def stream_seed(*parts: int) -> int:
    """One 62-bit seed from several numbers, the same in every process."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = ((state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 2
