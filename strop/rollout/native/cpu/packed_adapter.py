"""LoRA weights in the layout of a compiled product, packed when they are used for the first time and again
after they changed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Pack = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class PackedAdapter:
    """A packed copy of a LoRA adapter, A [rank, in] and B [out, rank]."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, pack: Pack) -> None:
        """`pack` copies A and B."""
        self.scale = scale
        self.rank = len(a)
        self._weights = (a, b)
        self._pack = pack
        self._versions: tuple[int, ...] = ()
        self._packed: tuple[Tensor, Tensor]

    def packed(self) -> tuple[Tensor, Tensor]:
        """A and B as they are now."""
        versions = tuple(weight._version for weight in self._weights)
        if versions != self._versions:
            a, b = self._weights
            self._packed = self._pack(a.detach(), b.detach())
            self._versions = versions
        return self._packed
