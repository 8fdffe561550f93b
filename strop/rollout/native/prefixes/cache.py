"""An index of the prefixes that the KV cache holds.

Prefix caching: the next turn of an agent starts with its whole last turn, samples of one prompt start alike,
and most prompts of a run share a system message. A sequence is found by hashes of its prefix at every 16th
token. A new sequence looks up its own hashes, longest first, and the keys and values of the common prefix are
copied or shared instead of computed. A finished sequence stays in its row as long as its memory is free. When
it is needed, the least recently used one is evicted, those of single turns before those of conversations,
which are likelier to continue.

Models with states can continue only where a snapshot of their states was kept (snapshots.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from strop.rollout.native.prefixes.hashes import BLOCK
from strop.rollout.native.prefixes.snapshots import StateSnapshots


@dataclass(eq=False)
class CachedPrefix:
    """A row whose first positions hold the keys and values of `tokens`."""

    row: int
    tokens: Sequence[int]
    hashes: list[int]
    multi_turn: bool = False
    """It is a conversation, which may continue."""
    last_used: int = 0
    adapter: int = 0
    """The adapter that computed them: see ScheduledSample."""


@dataclass(frozen=True)
class PrefixMatch:
    prefix: CachedPrefix
    num_tokens: int
    """Tokens in common."""


class PrefixCache:
    """Finds rows that hold the keys and values of a sequence's prefix."""

    def __init__(self) -> None:
        self.snapshots = StateSnapshots()
        """Of models with states."""
        self._by_hash: dict[int, CachedPrefix] = {}
        self._by_tokens: dict[tuple[int, tuple[int, ...]], CachedPrefix] = {}
        """Finished sequences by adapter and all of their tokens."""
        self.finished: dict[int, CachedPrefix] = {}
        """Finished sequences by row."""
        self.superseded: list[CachedPrefix] = []
        """Finished sequences that a running one contains; removed at the next `make_room`."""
        self._clock = 0

    def find(self, tokens: Sequence[int], hashes: Sequence[int], adapter: int = 0) -> PrefixMatch | None:
        """The row with the longest common prefix, if that is a block or more. `hashes` are those of
        `tokens` under `adapter`."""
        for i in range(len(hashes), 0, -1):
            prefix = self._by_hash.get(hashes[i - 1])
            common = i * BLOCK
            if prefix is None or prefix.adapter != adapter or prefix.tokens[:common] != tokens[:common]:
                continue
            limit = min(len(prefix.tokens), len(tokens))
            while common < limit and prefix.tokens[common] == tokens[common]:
                common += 1
            self._touch(prefix)
            return PrefixMatch(prefix, common)
        return None

    def find_snapshot(
        self, tokens: Sequence[int], hashes: Sequence[int], adapter: int = 0
    ) -> tuple[PrefixMatch, int] | None:
        """The longest beginning of `tokens`, shorter than all of them, after which states are kept and whose
        keys and values are in a row; and the slot of the states."""
        limit = len(tokens) - 1
        found = self.snapshots.find(tokens, adapter, limit)
        if found is None:
            return None
        finished = self._by_tokens.get((adapter, tuple(found.tokens)))
        if finished is not None:
            self._touch(finished)
            return PrefixMatch(finished, len(found.tokens)), found.slot
        match = self.find(tokens, hashes, adapter)
        if match is None:
            return None
        found = self.snapshots.find(tokens, adapter, min(match.num_tokens, limit))
        if found is None:
            return None
        return PrefixMatch(match.prefix, len(found.tokens)), found.slot

    def add(self, prefix: CachedPrefix) -> None:
        """From now on other sequences may copy from this row."""
        self._touch(prefix)
        self._by_hash.update(dict.fromkeys(prefix.hashes, prefix))

    def add_finished(self, prefix: CachedPrefix) -> None:
        """Keep a finished sequence in its row."""
        if prefix.hashes:
            self.add(prefix)
            self.finished[prefix.row] = prefix
            self._by_tokens[prefix.adapter, tuple(prefix.tokens)] = prefix

    def remove(self, prefix: CachedPrefix) -> None:
        """Other sequences may no longer copy from this row."""
        for number in prefix.hashes:
            if self._by_hash.get(number) is prefix:
                del self._by_hash[number]
        if self.finished.get(prefix.row) is prefix:
            del self.finished[prefix.row]
        key = (prefix.adapter, tuple(prefix.tokens))
        if self._by_tokens.get(key) is prefix:
            del self._by_tokens[key]

    def evict(self) -> int | None:
        """Remove the finished sequence that is likeliest not to be needed, and return its row; None if there
        is none."""
        if not self.finished:
            return None
        prefix = min(self.finished.values(), key=lambda prefix: (prefix.multi_turn, prefix.last_used))
        self.remove(prefix)
        return prefix.row

    def remove_finished(self) -> None:
        """Remove all finished sequences; running ones may still be copied from."""
        self.snapshots.clear()
        for prefix in list(self.finished.values()):
            self.remove(prefix)

    def clear(self) -> None:
        """The whole cache is outdated."""
        self.snapshots.clear()
        self._by_hash.clear()
        self._by_tokens.clear()
        self.finished.clear()
        self.superseded.clear()

    def fit(self, rows: int, capacity: int) -> None:
        """Remove finished sequences that are outside of a cache of this size."""
        for prefix in list(self.finished.values()):
            if prefix.row >= rows or len(prefix.tokens) > capacity:
                self.remove(prefix)

    @property
    def num_multi_turn(self) -> int:
        """Finished turns of conversations."""
        return sum(prefix.multi_turn for prefix in self.finished.values())

    def make_room(self, first: int, end: int, rows: int) -> list[tuple[int, int]]:
        """Clear the rows from `first` to `end` of a cache with so many rows. Returns moves (source, target)
        of finished sequences, to be done all at once."""
        for prefix in self.superseded:
            if self.finished.get(prefix.row) is prefix:
                self.remove(prefix)
        self.superseded.clear()
        surplus = max(0, len(self.finished) - (rows - end))
        by_use = sorted(self.finished.values(), key=lambda prefix: (prefix.multi_turn, prefix.last_used))
        for prefix in by_use[:surplus]:
            self.remove(prefix)
        in_the_way = sorted(row for row in self.finished if first <= row < end)
        free = islice((row for row in range(end, rows) if row not in self.finished), len(in_the_way))
        moves = list(zip(in_the_way, free))
        for source, target in moves:
            prefix = self.finished.pop(source)
            prefix.row = target
            self.finished[target] = prefix
        return moves

    def _touch(self, prefix: CachedPrefix) -> None:
        self._clock += 1
        prefix.last_used = self._clock
