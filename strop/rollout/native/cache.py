"""Keys and values of running sequences: one contiguous row each, [rows, heads, capacity, size] per layer.

Rows and capacity grow on demand. The interface is narrow (write, read, copy, resize) so that the layout may change behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from strop.rollout.native.accelerated import kernels

Index = Tensor | slice


class Cache:
    def __init__(self, layers: Mapping[int, tuple[int, int, int]], *, dtype: torch.dtype, device: torch.device) -> None:
        """`layers`: heads, size of a key and size of a value, by layer."""
        self.layers = dict(layers)
        self.dtype, self.device = dtype, device
        self.rows = self.capacity = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._alike: list[tuple[Tensor, Tensor]] | None = None

    @property
    def bytes_per_token(self) -> int:
        return sum(heads * (key + value) for heads, key, value in self.layers.values()) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.rows * self.capacity * self.bytes_per_token

    def resize(self, rows: int, capacity: int, keep: int) -> None:
        """Make room for `rows` sequences of `capacity` tokens; the first `keep` rows keep what they hold."""
        for layer, (heads, key, value) in self.layers.items():
            for held, size in ((self.keys, key), (self.values, value)):
                old = held.pop(layer, None)
                if old is not None and keep == 0:
                    old = None  # freed before the new one is taken
                # Zeros and not empty: a masked position has weight 0, and 0 times a stray NaN is NaN.
                new = torch.zeros(rows, heads, capacity, size, dtype=self.dtype, device=self.device)
                if old is not None:
                    length = min(capacity, old.shape[2])
                    new[:keep, :, :length] = old[:keep, :, :length]
                held[layer] = new
        self.rows, self.capacity, self._alike = rows, capacity, None

    def free(self) -> None:
        self.keys, self.values = {}, {}
        self.rows, self.capacity, self._alike = 0, 0, None

    def write(self, layer: int, rows: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Keys and values are [N, heads, size]; entry i goes to its row and position."""
        self.keys[layer][rows, :, positions] = key.to(self.dtype)
        self.values[layer][rows, :, positions] = value.to(self.dtype)

    def read(self, layer: int, rows: Index, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` positions of some rows; a view where rows are a slice."""
        return self.keys[layer][rows, :, :length], self.values[layer][rows, :, :length]

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        """All rows and positions, [rows, heads, capacity, size], for kernels that find their own way."""
        return self.keys[layer], self.values[layer]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """The first `length` positions of each source row, to its target row."""
        if not sources:
            return
        source, target = (torch.tensor(list(rows), device=self.device) for rows in (sources, targets))
        fast = kernels(self.device.type)
        if fast is not None:
            aside = not set(sources).isdisjoint(targets)
            for one, addresses in self._families():
                fast.copy_rows(one, addresses, source, target, length, aside=aside)
            return
        for held in (self.keys, self.values):
            for rows in held.values():
                rows[target, :, :length] = rows[source, :, :length]

    def _families(self) -> list[tuple[Tensor, Tensor]]:
        """Tensors of one shape each: one of them, and the addresses of all, so that one kernel can go through them."""
        if self._alike is None:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for tensor in (*self.keys.values(), *self.values.values()):
                shapes.setdefault(tensor.shape, []).append(tensor)
            self._alike = [
                (alike[0], torch.tensor([tensor.data_ptr() for tensor in alike], device=self.device))
                for alike in shapes.values()
            ]
        return self._alike

    def clear(self, rows: Sequence[int]) -> None:
        for held in (self.keys, self.values):
            for tensor in held.values():
                tensor[list(rows)] = 0
