"""Beginnings that are computed already: what running rows hold, and what ended sequences left in rows nobody needs yet.

An agent's next turn starts with all of its last one, episodes of one prompt start alike, and most prompts of a run share a
system message. A sequence is known here by hashes of its beginning at every 16th token; a newcomer looks up its own, longest
first, and the keys and values of the part in common are copied instead of computed.

An ended sequence stays in its row as long as the row is free. When a row is needed, the one that was used least recently goes,
those of plain batches before those of conversations, which are likelier to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

BLOCK = 16
_BASE = np.uint64(0x9E3779B97F4A7C15)


@cache
def _powers(size: int) -> np.ndarray:
    return np.cumprod(np.full(size, _BASE), dtype=np.uint64)


def marks(tokens: Sequence[int]) -> list[int]:
    """A hash of the first 16, 32, 48 ... tokens."""
    size = len(tokens) // BLOCK * BLOCK
    powers = _powers(1 << size.bit_length())[:size]
    values = np.array(tokens[:size], dtype=np.uint64) + np.uint64(1)
    found: list[int] = np.cumsum(values * powers, dtype=np.uint64)[BLOCK - 1 :: BLOCK].tolist()
    return found


@dataclass(eq=False)
class Holder:
    """A row whose first positions hold the keys and values of `tokens`."""

    row: int
    tokens: Sequence[int]
    marks: list[int]
    lasting: bool = False
    """It is a conversation, which may go on."""
    used: int = 0
    """When it was last of use."""


@dataclass(frozen=True)
class Match:
    holder: Holder
    shared: int
    """Tokens in common."""


class Prefixes:
    def __init__(self) -> None:
        self._at: dict[int, Holder] = {}
        self.kept: dict[int, Holder] = {}
        """Ended sequences by their row."""
        self.outgrown: list[Holder] = []
        """To go at the next `make_way`."""
        self._clock = 0

    def find(self, tokens: Sequence[int], own: Sequence[int]) -> Match | None:
        """The row with the longest beginning in common, if that is a block or more. `own` are the marks of `tokens`."""
        for i in range(len(own), 0, -1):
            holder = self._at.get(own[i - 1])
            shared = i * BLOCK
            if holder is None or holder.tokens[:shared] != tokens[:shared]:
                continue
            most = min(len(holder.tokens), len(tokens))
            while shared < most and holder.tokens[shared] == tokens[shared]:
                shared += 1
            self._touch(holder)
            return Match(holder, shared)
        return None

    def add(self, holder: Holder) -> None:
        """From now on others may copy from this row."""
        self._touch(holder)
        self._at.update(dict.fromkeys(holder.marks, holder))

    def keep(self, holder: Holder) -> None:
        """An ended sequence stays in its row."""
        if holder.marks:
            self.add(holder)
            self.kept[holder.row] = holder

    def drop(self, holder: Holder) -> None:
        for mark in holder.marks:
            if self._at.get(mark) is holder:
                del self._at[mark]
        if self.kept.get(holder.row) is holder:
            del self.kept[holder.row]

    def leave(self) -> None:
        """Forget all that ended; what runs may still be copied from."""
        for holder in list(self.kept.values()):
            self.drop(holder)

    def clear(self) -> None:
        """Nothing in the cache is of use any more."""
        self._at.clear()
        self.kept.clear()
        self.outgrown.clear()

    def within(self, rows: int, capacity: int) -> None:
        """Forget what stands outside a cache of this size."""
        for holder in [h for h in self.kept.values() if h.row >= rows or len(h.tokens) > capacity]:
            self.drop(holder)

    @property
    def lasting(self) -> int:
        return sum(holder.lasting for holder in self.kept.values())

    def make_way(self, first: int, end: int, rows: int) -> list[tuple[int, int]]:
        """Clear the rows from `first` to `end` of a cache of so many rows; returns moves (from, to), to be done all at once."""
        for holder in self.outgrown:
            if self.kept.get(holder.row) is holder:
                self.drop(holder)
        self.outgrown.clear()
        surplus = max(0, len(self.kept) - (rows - end))
        for holder in sorted(self.kept.values(), key=lambda h: (h.lasting, h.used))[:surplus]:
            self.drop(holder)
        free = (row for row in range(end, rows) if row not in self.kept)
        moves = list(zip(sorted(row for row in self.kept if first <= row < end), free))
        for source, target in moves:
            holder = self.kept.pop(source)
            holder.row = target
            self.kept[target] = holder
        return moves

    def _touch(self, holder: Holder) -> None:
        self._clock += 1
        holder.used = self._clock
