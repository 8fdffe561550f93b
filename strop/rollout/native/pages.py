"""The KV cache on a GPU: pages of 64 tokens, so that memory follows the tokens that it holds.

A layer's keys are [pages, heads, PAGE, size], its values likewise; a sequence is a list of pages. Kernels
find the pages of the running rows in a table on the device. Sequences with the same beginning share its full
pages; the page in which they begin to differ is copied. A page is as long as the block of keys that the
attention kernels take at a time, so they sum in the same order as training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from strop.models.layouts.states import RowStates
from strop.rollout.native.kv_cache import CacheTensors, Evict, Index, kernels
from strop.rollout.native.requests import RowPlacement

PAGE = 64
"""Tokens of a page: models/flash.py BLOCK."""
SPARE = 2
"""Pages that no sequence has: the one that idle rows write to, and one that is copied from while it is
replaced."""


def pages_for(tokens: int) -> int:
    """Pages of a sequence of so many tokens."""
    return -(-tokens // PAGE)


class PagePool:
    """Which sequence, by its row, has which pages. On the host."""

    def __init__(self) -> None:
        self.size = 0
        self.pages: dict[int, list[int]] = {}
        """Pages of each row, in order."""
        self._uses = np.zeros(0, dtype=np.int32)
        """Rows that have a page, and placements in progress that copy from it."""
        self._free: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return max(0, self.size - 1 - len(self._free))

    def grow(self, size: int) -> None:
        """Have so many pages. Page 0 is never free."""
        uses = np.zeros(size, dtype=np.int32)
        uses[: self.size] = self._uses
        self._uses = uses
        first = max(1, self.size)
        self._free += range(size - 1, first - 1, -1)
        self.size = size

    def take(self, count: int) -> list[int]:
        """Free pages, which now have one use."""
        taken = [self._free.pop() for _ in range(count)]
        self._uses[taken] = 1
        return taken

    def use(self, pages: Sequence[int]) -> None:
        """One more use of these pages, none of which is free."""
        self._uses[list(pages)] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """One use less of these pages; those without any become free."""
        index = np.array(pages, dtype=np.int64)
        self._uses[index] -= 1
        self._free += index[self._uses[index] == 0].tolist()

    def release(self, row: int) -> None:
        """The sequence of a row is gone."""
        pages = self.pages.pop(row, None)
        if pages:
            self.drop(pages)

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Sequences change their rows (source, target), all at once."""
        moved = [(target, self.pages.pop(source)) for source, target in moves]
        for target, pages in moved:
            self.release(target)
            self.pages[target] = pages

    def own(self, row: int) -> list[int]:
        """Pages of a row that no other row has."""
        return [page for page in self.pages.get(row, []) if self._uses[page] == 1]

    def num_only(self, rows: Collection[int]) -> int:
        """Pages that would become free without these rows, or a few less."""
        return sum(int((self._uses[self.pages.get(row, [])] == 1).sum()) for row in rows)


class PagedKVCache:
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
        self.pool = PagePool()
        self.table = torch.zeros(0, 0, dtype=torch.int32, device=device)
        """Pages of the running rows. Entries without a page are 0."""
        self._groups: list[tuple[Tensor, Tensor]] | None = None

    @property
    def rows(self) -> int:
        """Rows that can run at the same time."""
        return self.table.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a row can have."""
        return self.table.shape[1] * PAGE

    @property
    def tokens(self) -> int:
        """Tokens that the memory is for."""
        return self.pool.size * PAGE

    @property
    def bytes_per_token(self) -> int:
        return self.tensors.bytes_per_token

    @property
    def bytes(self) -> int:
        return self.tokens * self.bytes_per_token

    # --- size -----------------------------------------------------------------------------------------------

    def resize_table(self, rows: int, capacity: int) -> None:
        """Room for so many running rows, and tokens in each."""
        if self.has_states:
            self.states.resize(rows, min(rows, self.rows))
        self.table = torch.zeros(rows, pages_for(capacity), dtype=torch.int32, device=self.device)
        self._upload(row for row in self.pool.pages if row < rows)

    def resize_pool(self, pages: int) -> None:
        """Have so many pages; the old ones keep their contents."""
        self.tensors.resize(pages, PAGE, self.pool.size if self.pool.pages else 0)
        self.pool.grow(pages)
        self._groups = None

    def free(self) -> None:
        """Free all memory."""
        if self.has_states:
            self.states.free()
        self.tensors.free()
        self.pool = PagePool()
        self.table = torch.zeros(0, 0, dtype=torch.int32, device=self.device)
        self._groups = None

    # --- contents -------------------------------------------------------------------------------------------

    def slots(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where `tensors.write` puts the tokens of these rows and positions: pages and places in them."""
        return self.table[rows, positions // PAGE].long(), positions % PAGE

    def read(self, layer: int, rows: Index, length: int) -> tuple[Tensor, Tensor]:
        """A copy of the first `length` positions of some rows, [rows, heads, length, size]."""
        keys, values = self.tensors.read(layer, self.table[rows, : pages_for(length)].long())
        keys = keys.transpose(1, 2).flatten(2, 3)
        values = values.transpose(1, 2).flatten(2, 3)
        return keys[:, :, :length], values[:, :, :length]

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        """All pages, [pages, heads, PAGE, size], as they are stored, for kernels."""
        return self.tensors.whole(layer)

    def tables(self, rows: Index) -> Tensor:
        """The pages of some rows, [rows, pages], for kernels."""
        return self.table[rows]

    def clear(self, rows: Sequence[int]) -> None:
        """Set the pages that only these rows have to 0."""
        pages = [page for row in rows for page in self.pool.own(row)]
        self.tensors.clear(pages)
        if self.has_states:
            self.states.clear(rows)

    # --- rows -----------------------------------------------------------------------------------------------

    def place(
        self,
        placements: Sequence[RowPlacement],
        moves: Sequence[tuple[int, int]],
        moved_length: int,
        evict: Evict,
    ) -> int:
        """Make these moves (source, target), give pages to these placements, and copy the partial pages of
        prefixes that are computed already. Returns how many placements, from the first, have memory."""
        pool = self.pool
        prefixes = {}
        for placement in placements:
            if placement.source is not None and not placement.source_is_new:
                used = pool.pages[placement.source][: pages_for(placement.num_shared)]
                pool.use(used)
                prefixes[placement.row] = used
        pool.move(moves)
        sources = []
        targets = []
        placed = 0
        for placement in placements:
            pool.release(placement.row)
            prefix = prefixes.get(placement.row, [])
            if placement.source is not None and placement.source_is_new:
                prefix = pool.pages[placement.source]
            shared = prefix[: placement.num_shared // PAGE]
            fresh = self._take(pages_for(placement.length) - len(shared), evict)
            if fresh is None:
                break
            pool.use(shared)
            pool.pages[placement.row] = [*shared, *fresh]
            if placement.row in prefixes and placement.num_shared % PAGE:
                sources.append(prefix[len(shared)])
                targets.append(fresh[0])
            placed += 1
        self._copy(sources, targets)
        for used in prefixes.values():
            pool.drop(used)
        self._upload(placement.row for placement in placements[:placed])
        return placed

    def share(self, placements: Sequence[RowPlacement]) -> None:
        """The sources of these placements are computed now: copy the last page that they share in part."""
        sources = []
        targets = []
        for placement in placements:
            page = placement.num_shared // PAGE
            if placement.source is not None and placement.num_shared % PAGE:
                sources.append(self.pool.pages[placement.source][page])
                targets.append(self.pool.pages[placement.row][page])
        self._copy(sources, targets)
        self._copy_states([(one.source, one.row) for one in placements if one.source is not None])

    def reserve(self, lengths: Sequence[int], evict: Evict) -> bool:
        """Give the running rows pages for these lengths; False, and none, if there are not enough."""
        pages = self.pool.pages
        missing = [max(0, pages_for(length) - len(pages[row])) for row, length in enumerate(lengths)]
        fresh = self._take(sum(missing), evict)
        if fresh is None:
            return False
        entries = []
        for row, count in enumerate(missing):
            for _ in range(count):
                page = fresh.pop()
                entries.append((row, len(pages[row]), page))
                pages[row].append(page)
        if entries:
            rows, columns, numbers = torch.tensor(entries, device=self.device).unbind(1)
            self.table[rows, columns] = numbers.to(torch.int32)
        return True

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Move rows (source, target), all at once."""
        self.pool.move(moves)
        self._upload(target for _, target in moves)
        self._copy_states(moves)

    def keep(self, running: int, finished: Collection[int]) -> None:
        """Only the first rows and these are in use any more."""
        gone = [row for row in self.pool.pages if row >= running and row not in finished]
        for row in gone:
            self.pool.release(row)
        self.table[running:] = 0  # idle rows of a recorded step must not write to pages of others

    def _copy_states(self, moves: Sequence[tuple[int, int]]) -> None:
        if moves and self.states:
            source, target = torch.tensor(list(moves), device=self.device).unbind(1)
            if self.has_states:
                self.states.copy(source, target)

    def _take(self, count: int, evict: Evict) -> list[int] | None:
        while self.pool.num_free < count:
            row = evict()
            if row is None:
                return None
            self.pool.release(row)
        return self.pool.take(count)

    def _upload(self, rows: Iterable[int]) -> None:
        """Copy the pages of these rows to the table on the device."""
        wanted = [row for row in rows if row < self.rows]
        if not wanted:
            return
        longest = max(len(self.pool.pages[row]) for row in wanted)
        lines = np.zeros((len(wanted), longest), dtype=np.int32)
        for line, row in zip(lines, wanted):
            pages = self.pool.pages[row]
            line[: len(pages)] = pages
        index = torch.tensor(wanted, device=self.device)
        self.table[index, :longest] = torch.from_numpy(lines).to(self.device)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy source pages to target pages, in all layers."""
        if not sources:
            return
        source, target = torch.tensor([sources, targets], device=self.device)
        fast = kernels(self.device.type)
        if fast is not None:
            for example, addresses in self._by_shape():
                fast.copy_pages(example, addresses, source, target)
            return
        self.tensors.copy(source, target, PAGE)

    def _by_shape(self) -> list[tuple[Tensor, Tensor]]:
        """For each shape: one tensor of that shape, and the addresses of all, so that one kernel copies
        all."""
        if self._groups is None:
            shapes: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
            for tensor in self.tensors.all:
                shapes.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
            self._groups = []
            for tensors in shapes.values():
                addresses = [tensor.data_ptr() for tensor in tensors]
                self._groups.append((tensors[0], torch.tensor(addresses, device=self.device)))
        return self._groups
