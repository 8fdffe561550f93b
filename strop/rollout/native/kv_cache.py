"""The KV cache: keys and values of running sequences, and of finished ones that others may begin with.

`KVCache` is for devices without kernels, such as a CPU: each sequence has one contiguous row, [rows, heads,
capacity, size] per layer. Rows and capacity grow on demand. `PagedKVCache` (pages.py) is for a GPU. Both have
the same interface: the step loop says which sequences are admitted, moved and removed.

Prefix caching: a sequence that begins like another one (the last turn of an agent, a system message) is found
by hashes at every 16th token, and the keys and values of the common prefix are copied or shared. Finished
sequences stay in their rows while memory is free; those of single turns are evicted before conversations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import ModuleType

import torch
from torch import Tensor

from strop.extras import MissingExtra, require
from strop.models.layouts.states import RowStates
from strop.rollout.native.requests import BLOCK, CachedPrefix, RowPlacement

Index = Tensor | slice
TensorIndex = Index | tuple[Index, ...]
Evict = Callable[[], int | None]
"""Forgets one finished sequence and returns its row; None if there is none."""


@cache
def kernels(device: str) -> ModuleType | None:
    """The Triton kernels for a device type, or None: then plain torch computes the same."""
    if device != "cuda":
        return None
    try:
        return require("strop.rollout.native.kernels", extra="gpu", why="Fast decoding on a GPU")
    except MissingExtra as error:
        warnings.warn(f"{error} Decoding falls back to plain torch, several times slower.", stacklevel=2)
        return None


class CacheTensors:
    """Of each layer keys and values [places, heads, positions, size]; a place is a row or a page."""

    def __init__(
        self, layers: Mapping[int, tuple[int, int, int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`layers`: by layer, the number of key heads, the size of a key and the size of a value."""
        self.layers = dict(layers)
        self.dtype = dtype
        """Precision of what is written and read."""
        self.stored = dtype
        self.device = device
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def kinds(self) -> list[dict[int, Tensor]]:
        """Keys, values, and what else there is, by layer."""
        return [self.keys, self.values]

    def sizes(self, layer: int) -> list[int]:
        """Numbers per head and token of each kind."""
        return list(self.layers[layer][1:])

    @property
    def all(self) -> list[Tensor]:
        return [tensor for tensors in self.kinds for tensor in tensors.values()]

    @property
    def bytes_per_token(self) -> int:
        numbers = sum(heads * sum(self.sizes(layer)) for layer, (heads, _, _) in self.layers.items())
        return max(1, numbers * self.stored.itemsize)

    def resize(self, places: int, positions: int, keep: int) -> None:
        """Have so many places; the first `keep` keep their contents."""
        for layer, (heads, _, _) in self.layers.items():
            for tensors, size in zip(self.kinds, self.sizes(layer)):
                old = tensors.pop(layer, None)
                if old is not None and keep == 0:
                    old = None  # freed before the new tensor is allocated
                # zeros, not empty: a masked position has weight 0, and 0 times NaN is NaN.
                new = torch.zeros(places, heads, positions, size, dtype=self.stored, device=self.device)
                if old is not None:
                    length = min(positions, old.shape[2])
                    new[:keep, :, :length] = old[:keep, :, :length]
                tensors[layer] = new

    def free(self) -> None:
        for tensors in self.kinds:
            tensors.clear()

    def write(
        self, layer: int, slots: tuple[Tensor, Tensor], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [N, heads, size], entry i to its slot, and return them as they are stored."""
        self.keys[layer][slots[0], :, slots[1]] = key.to(self.dtype)
        self.values[layer][slots[0], :, slots[1]] = value.to(self.dtype)
        return key, value

    def read(self, layer: int, index: TensorIndex) -> tuple[Tensor, Tensor]:
        """A part of the keys and values; a view if `index` has slices alone (not in 8 bits)."""
        return self.keys[layer][index], self.values[layer][index]

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values as they are stored, for kernels."""
        return self.keys[layer], self.values[layer]

    def exponents(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Those of `whole` in 8 bits: see quantization/cache.py."""
        return None

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of places, all at once."""
        for tensor in self.all:
            tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, places: Sequence[int]) -> None:
        """Set these places to 0."""
        for tensor in self.all:
            tensor[list(places)] = 0


class KVCache:
    def __init__(
        self,
        layers: Mapping[int, tuple[int, int, int]],
        states: RowStates | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tensors: Callable[..., CacheTensors] = CacheTensors,
    ) -> None:
        """`layers`: by layer, the number of key heads, the size of a key and the size of a value. `states`:
        those of mixers, by row. `tensors`: how keys and values are stored."""
        self.tensors = tensors(layers, dtype, device)
        self.states = states or RowStates()
        self.has_states = bool(self.states)
        self.dtype = dtype
        self.device = device
        self.rows = 0
        self.capacity = 0

    @property
    def bytes_per_token(self) -> int:
        return self.tensors.bytes_per_token

    @property
    def bytes(self) -> int:
        return self.rows * self.capacity * self.bytes_per_token

    def resize(self, rows: int, capacity: int, keep: int) -> None:
        """Make room for `rows` sequences of `capacity` tokens; the first `keep` rows keep their contents."""
        self.tensors.resize(rows, capacity, keep)
        if self.has_states:
            self.states.resize(rows, keep)
        self.rows = rows
        self.capacity = capacity

    def free(self) -> None:
        """Free all memory."""
        if self.has_states:
            self.states.free()
        self.tensors.free()
        self.rows = 0
        self.capacity = 0

    @property
    def tokens(self) -> int:
        """Tokens that the memory is for."""
        return self.rows * self.capacity

    def slots(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where `tensors.write` puts the tokens of these rows and positions."""
        return rows, positions

    def read(self, layer: int, rows: Index, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` positions of some rows; a view if `rows` is a slice (not in 8 bits)."""
        return self.tensors.read(layer, (rows, slice(None), slice(length)))

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        """All rows and positions, [rows, heads, capacity, size], as they are stored, for kernels."""
        return self.tensors.whole(layer)

    def tables(self, rows: Index) -> Tensor:
        """For kernels, the pages of some rows: here a row is one page."""
        if isinstance(rows, slice):
            rows = torch.arange(self.rows, device=self.device)[rows]
        return rows[:, None]

    def place(
        self,
        placements: Sequence[RowPlacement],
        moves: Sequence[tuple[int, int]],
        moved_length: int,
        evict: Evict,
    ) -> int:
        """Make these moves (source, target) of up to `moved_length` tokens, copy the prefixes that are
        computed already, and return how many placements have memory: here all of them."""
        sources = [source for source, _ in moves]
        targets = [target for _, target in moves]
        length = moved_length
        for placement in placements:
            if placement.source is None or placement.source_is_new:
                continue
            length = max(length, placement.num_shared)
            if placement.source != placement.row:
                sources.append(placement.source)
                targets.append(placement.row)
        self._copy(sources, targets, length)
        return len(placements)

    def share(self, placements: Sequence[RowPlacement]) -> None:
        """The sources of these placements are computed now: the targets hold the same from now on."""
        sources = [placement.source for placement in placements if placement.source is not None]
        longest = max((placement.num_shared for placement in placements), default=0)
        self._copy(sources, [placement.row for placement in placements], longest)

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Move rows (source, target) of up to `length` tokens, all at once."""
        self._copy([source for source, _ in moves], [target for _, target in moves], length)

    def keep(self, running: int, finished: Collection[int]) -> None:
        """Only the first rows and these are in use any more."""

    def _copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source row to its target row, all at once."""
        if not sources:
            return
        source = torch.tensor(list(sources), device=self.device)
        target = torch.tensor(list(targets), device=self.device)
        self.tensors.copy(source, target, length)
        if self.has_states:
            self.states.copy(source, target)

    def clear(self, rows: Sequence[int]) -> None:
        """Set these rows to 0."""
        self.tensors.clear(rows)
        if self.has_states:
            self.states.clear(rows)


# --- prefix caching ---------------------------------------------------------------------------------------


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
