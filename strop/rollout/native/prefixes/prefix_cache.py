"""Prefix caching: a sequence that begins like another one (the last turn of an agent, a system message) is
found by hashes at every 16th token, and the keys and values of the common prefix are copied or shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from strop.rollout.native.prefixes.hashes import BLOCK, block_hashes


@dataclass(eq=False)
class CachedPrefix:
    """A row whose first positions hold the keys and values of `tokens`."""

    row: int
    tokens: Sequence[int]
    multi_turn: bool = False
    """It is a conversation, which may continue."""
    last_used: int = 0
    adapter: int = 0
    """The adapter that computed them: see ScheduledSample."""
    indexed: bool = False
    """It can be found."""

    @cached_property
    def hashes(self) -> list[int]:
        """Of the first 16, 32, 48 ... tokens, under the adapter."""
        return block_hashes(self.tokens, self.adapter)


@dataclass(frozen=True)
class PrefixMatch:
    prefix: CachedPrefix
    num_tokens: int
    """Tokens in common."""


class PrefixCache:
    """Finds rows that hold the keys and values of a sequence's prefix."""

    def __init__(self) -> None:
        self.on_clear: Callable[[], None] | None = None
        """When finished sequences are removed."""
        self._by_hash: dict[int, CachedPrefix] = {}
        self._by_tokens: dict[tuple[int, tuple[int, ...]], CachedPrefix] = {}
        """Finished sequences by adapter and all of their tokens."""
        self.finished: dict[int, CachedPrefix] = {}
        """Finished sequences by row."""
        self._unindexed: list[CachedPrefix] = []
        """Finished sequences that nobody has looked for. After the last step of a batch nobody does: the next
        weights make them outdated, and hashing a thousand of them takes 50 ms."""
        self.superseded: list[CachedPrefix] = []
        """Finished sequences that a running one contains; removed at the next `make_room`."""
        self._clock = 0

    def find(self, tokens: Sequence[int], hashes: Sequence[int], adapter: int = 0) -> PrefixMatch | None:
        """The row with the longest common prefix, if that is a block or more. `hashes` are those of
        `tokens` under `adapter`."""
        self._index_finished()
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

    def find_finished(self, tokens: Sequence[int], adapter: int) -> CachedPrefix | None:
        """The finished sequence of exactly these tokens."""
        self._index_finished()
        found = self._by_tokens.get((adapter, tuple(tokens)))
        if found is not None:
            self._touch(found)
        return found

    def add(self, prefix: CachedPrefix) -> None:
        """From now on other sequences may copy from this row."""
        self._index_finished()  # of two that begin alike, the newer one is found
        self._touch(prefix)
        self._index(prefix)

    def add_finished(self, prefix: CachedPrefix) -> None:
        """Keep a finished sequence in its row."""
        if len(prefix.tokens) >= BLOCK:
            self._touch(prefix)
            self.finished[prefix.row] = prefix
            self._unindexed.append(prefix)

    def _index_finished(self) -> None:
        for prefix in self._unindexed:
            if self.finished.get(prefix.row) is prefix:
                self._index(prefix)
                self._by_tokens[prefix.adapter, tuple(prefix.tokens)] = prefix
        self._unindexed.clear()

    def _index(self, prefix: CachedPrefix) -> None:
        self._by_hash.update(dict.fromkeys(prefix.hashes, prefix))
        prefix.indexed = True

    def remove(self, prefix: CachedPrefix) -> None:
        """Other sequences may no longer copy from this row."""
        if self.finished.get(prefix.row) is prefix:
            del self.finished[prefix.row]
        if not prefix.indexed:
            return
        for number in prefix.hashes:
            if self._by_hash.get(number) is prefix:
                del self._by_hash[number]
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
        if self.on_clear is not None:
            self.on_clear()
        for prefix in list(self.finished.values()):
            self.remove(prefix)

    def clear(self) -> None:
        """The whole cache is outdated."""
        if self.on_clear is not None:
            self.on_clear()
        self._by_hash.clear()
        self._by_tokens.clear()
        self.finished.clear()
        self._unindexed.clear()
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
