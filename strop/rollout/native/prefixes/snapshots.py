"""Where a model with states can continue: after which tokens its states are kept, and in which slot.

States cannot be cut back to an earlier token, so they are kept before the last token of a prompt (its samples
need the logits of that token) and at the end of a turn. A sequence that begins with exactly those tokens
continues there. Slots are a part of the memory of the cache; when all are taken, the one that was least
recently used is evicted. Keys and values of the same tokens are found by the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strop.rollout.native.kv_cache import PrefixCache, PrefixMatch
from strop.rollout.native.requests import prefix_hashes

SnapshotKey = tuple[int, int, int]
"""Adapter, number of tokens, their hash."""


@dataclass(eq=False)
class Snapshot:
    """The states after `tokens` are kept in `slot`."""

    slot: int
    tokens: Sequence[int]
    last_used: int = 0


class StateSnapshots:
    def __init__(self) -> None:
        self.max_slots = 0
        """Slots that there is memory for; 0: nothing is kept."""
        self._by_key: dict[SnapshotKey, Snapshot] = {}
        self._lengths: Counter[int] = Counter()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def set_slots(self, count: int) -> None:
        """There is memory for so many slots; what is kept in others is forgotten."""
        self.max_slots = count
        for key, snapshot in list(self._by_key.items()):
            if snapshot.slot >= count:
                self._remove(key)

    def find(self, tokens: Sequence[int], adapter: int, limit: int) -> Snapshot | None:
        """The longest beginning of `tokens`, of at most `limit` tokens, whose states are kept."""
        if not self._by_key:
            return None
        hashes = prefix_hashes(tokens[:limit])
        for length in sorted(self._lengths, reverse=True):
            if length > limit:
                continue
            found = self._by_key.get((adapter, length, int(hashes[length - 1])))
            if found is not None and tuple(found.tokens) == tuple(tokens[:length]):
                self._touch(found)
                return found
        return None

    def add(self, tokens: Sequence[int], adapter: int) -> int | None:
        """The slot in which the states after these tokens are to be kept; None: they are kept already, or
        there is no memory for any. A slot that is given again has lost what it held."""
        key = (adapter, len(tokens), int(prefix_hashes(tokens)[-1]))
        known = self._by_key.get(key)
        if known is not None:
            self._touch(known)
        if known is not None or not self.max_slots:
            return None
        if len(self._by_key) < self.max_slots:
            used = {snapshot.slot for snapshot in self._by_key.values()}
            slot = next(slot for slot in range(self.max_slots) if slot not in used)
        else:
            oldest = min(self._by_key, key=lambda key: self._by_key[key].last_used)
            slot = self._by_key[oldest].slot
            self._remove(oldest)
        snapshot = Snapshot(slot, tuple(tokens))
        self._by_key[key] = snapshot
        self._lengths[len(tokens)] += 1
        self._touch(snapshot)
        return slot

    def clear(self) -> None:
        """All states are outdated."""
        self._by_key.clear()
        self._lengths.clear()

    def _remove(self, key: SnapshotKey) -> None:
        del self._by_key[key]
        self._lengths[key[1]] -= 1
        if not self._lengths[key[1]]:
            del self._lengths[key[1]]

    def _touch(self, snapshot: Snapshot) -> None:
        self._clock += 1
        snapshot.last_used = self._clock


def find_continuation(
    snapshots: StateSnapshots,
    cache: PrefixCache,
    tokens: Sequence[int],
    hashes: Sequence[int],
    adapter: int,
) -> tuple[PrefixMatch, int] | None:
    """The longest beginning of `tokens`, shorter than all of them, after which states are kept and whose keys
    and values are in a row; and the slot of the states."""
    limit = len(tokens) - 1
    found = snapshots.find(tokens, adapter, limit)
    if found is None:
        return None
    finished = cache.find_finished(found.tokens, adapter)
    if finished is not None:
        return PrefixMatch(finished, len(found.tokens)), found.slot
    match = cache.find(tokens, hashes, adapter)
    if match is None:
        return None
    found = snapshots.find(tokens, adapter, min(match.num_tokens, limit))
    if found is None:
        return None
    return PrefixMatch(match.prefix, len(found.tokens)), found.slot
