"""The KV cache of a model that drafts: pages, so that memory follows the lengths of the rows that it follows.

It grows with these lengths. `most_pages` limits it; rows for which no page is left are not followed, and
nothing is drafted for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from strop.rollout.native.pages import PAGE, SPARE, PagedKVCache, pages_for


class DraftCache(PagedKVCache):
    def __init__(
        self, layers: Mapping[int, tuple[int, int, int]], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers, dtype=dtype, device=device)
        self.most_pages: int | None = None
        """None: as many as are needed."""
        self.before_resize: Callable[[], None] = lambda: None
        """Called before tensors are replaced, to which recorded passes point."""
        self.followed = torch.zeros(0, dtype=torch.bool, device=device)
        """[rows] whether a row has its pages."""
        self._has_pages: list[bool] = []

    def limit(self, size: int, per_token: int, most_tokens: int) -> int:
        """Divide `size` bytes with a cache that takes `per_token`, so that both hold as many tokens, but at
        most `most_tokens` here. Returns the bytes of this cache."""
        tokens = min(max(0, size) // (per_token + self.bytes_per_token), most_tokens)
        self.most_pages = tokens // PAGE + SPARE
        return self.most_pages * PAGE * self.bytes_per_token

    def fit(self, rows: int, capacity: int) -> bool:
        """Room for so many rows of up to `capacity` tokens; pages are given by `hold`. Returns whether the
        rows are empty again, because there was other room before."""
        if self.table.shape == (rows, pages_for(capacity)):
            return False
        self.before_resize()
        self.keep(0, ())
        self.resize_table(rows, capacity)
        self.followed = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self._has_pages = []
        return True

    def hold(self, lengths: Sequence[int]) -> list[bool]:
        """Give the first rows pages for these lengths, and free those of the other rows. Returns which rows
        have theirs."""
        self.keep(len(lengths), ())
        pool = self.pool
        missing = []
        changed = set()
        for row, length in enumerate(lengths):
            own = pool.pages.setdefault(row, [])
            needed = pages_for(length)
            missing.append(max(0, needed - len(own)))
            if len(own) != needed:
                changed.add(row)
            if len(own) > needed:  # the row had another sequence before
                pool.drop(own[needed:])
                del own[needed:]
        self._grow(pool.num_used + sum(missing) + SPARE)
        found = []
        for row, count in enumerate(missing):
            enough = count <= pool.num_free
            if not enough:
                pool.release(row)
            elif count:
                pool.pages[row] += pool.take(count)
            found.append(enough)
        if changed:
            self.table[sorted(changed)] = 0  # a row without pages writes to page 0
            self._upload(row for row in sorted(changed) if found[row])
        if found != self._has_pages:
            self.followed[: len(found)] = torch.tensor(found, device=self.device)
            self._has_pages = found
        return found

    def free(self) -> None:
        super().free()
        self.followed = torch.zeros(0, dtype=torch.bool, device=self.device)
        self._has_pages = []

    def _grow(self, pages: int) -> None:
        size = self.pool.size
        if pages <= size:
            return
        wanted = max(pages, size * 3 // 2)  # a few times larger instead of a little larger many times
        if self.most_pages is not None:
            wanted = min(wanted, self.most_pages)
        wanted = max(wanted, SPARE)
        if wanted > size:
            self.before_resize()
            self.resize_pool(wanted)


def move_rows(tensors: Sequence[Tensor], moves: Sequence[tuple[int, int]]) -> None:
    """Rows (source, target) of tensors change their places, all at once."""
    if not moves:
        return
    source, target = torch.tensor(list(moves), device=tensors[0].device).unbind(1)
    for tensor in tensors:
        tensor[target] = tensor[source]
