"""Where products of few rows and a large weight are computed by a kernel of Strop's (few_row_kernels.py).

The rollout engine names the weights. For each shape the bits of the kernel are compared once with those of a
product of many rows, as training computes it; if a bit differs, cuBLAS computes few rows too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from strop.extras import MissingExtra, require
from strop.models.self_check import same

MOST_ROWS = 32
_DEVICES = ("cuda",)
_LEAST_WEIGHTS = 2**24
"""With fewer weights cuBLAS is as fast."""
_MANY_ROWS = 1024


@dataclass(frozen=True)
class ProductShape:
    """What the kernel is compiled and checked for."""

    device: torch.device
    dtype: torch.dtype
    outputs: int
    inputs: int
    parts: int
    """Parts of the inputs that are summed apart."""


_users: Counter[ProductShape] = Counter()
"""Uses of the kernel by models, by shape."""
_checked: dict[ProductShape, bool] = {}


@cache
def _kernels() -> ModuleType | None:
    try:
        return require("strop.models.projections.few_row_kernels", extra="gpu", why="Fast decode steps")
    except MissingExtra:
        return None


def takes(rows: Tensor, weight: Tensor, parts: int = 1) -> bool:
    """Whether the kernel computes the product of `rows` [n, in] and `weight` [out, in]."""
    if len(rows) > MOST_ROWS or weight.numel() < _LEAST_WEIGHTS:
        return False
    return _users[_shape(weight, parts)] > 0 and rows.dtype == weight.dtype and rows.stride(1) == 1


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight.T in their dtype, without gradients."""
    kernels = _kernels()
    assert kernels is not None
    found: Tensor = kernels.product(rows, weight, 1, rows.dtype)
    return found[0]


def partial_products(rows: Tensor, weight: Tensor, parts: int) -> Tensor:
    """The same for the inputs of each part alone, in float32: [parts, n, out]."""
    kernels = _kernels()
    assert kernels is not None
    found: Tensor = kernels.product(rows, weight, parts, torch.float32)
    return found


class UseFewRows:
    """Lets the engine compute few rows of one product with the kernel. A change of
    rollout/native/borrowed_model.py."""

    def __init__(self, weight: Callable[[], Tensor], parts: int) -> None:
        """`weight` is asked whenever the change is made: it may have moved."""
        self._weight = weight
        self._parts = parts
        self._shape: ProductShape | None = None

    def fits(self) -> bool:
        """Whether the kernel can multiply with this weight, and pays."""
        return fits(self._weight(), self._parts)

    def do(self) -> None:
        weight = self._weight()
        if fits(weight, self._parts) and _has_same_bits(weight, self._parts):
            self._shape = _shape(weight, self._parts)
            _users[self._shape] += 1

    def undo(self) -> None:
        if self._shape is not None:
            _users[self._shape] -= 1
            self._shape = None

    def can_undo(self) -> bool:
        return True


def fits(weight: Tensor, parts: int) -> bool:
    """Whether the kernel can multiply with `weight`, and is faster than cuBLAS."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16) and weight.device.type in _DEVICES
    if not narrow or weight.numel() < _LEAST_WEIGHTS or weight.stride(1) != 1:
        return False
    kernels = _kernels()
    if kernels is None:
        return False
    outputs, inputs = weight.shape
    return outputs % kernels.OUTPUTS == 0 and inputs % (kernels.CHUNK * parts) == 0


def _has_same_bits(weight: Tensor, parts: int) -> bool:
    shape = _shape(weight, parts)
    if shape not in _checked:
        with torch.no_grad():
            _checked[shape] = _same_bits(weight, parts)
    return _checked[shape]


def _same_bits(weight: Tensor, parts: int) -> bool:
    """Whether few rows have the bits that they have among many."""
    draw = torch.Generator(weight.device).manual_seed(0)
    shape = (_MANY_ROWS, weight.shape[1])
    rows = torch.randn(shape, generator=draw, device=weight.device, dtype=weight.dtype)
    size = weight.shape[1] // parts

    def many() -> list[Tensor]:
        if parts == 1:
            return [(rows @ weight.t())[:MOST_ROWS]]
        pairs = zip(rows.split(size, 1), weight.split(size, 1), strict=True)
        return [torch.mm(a, b.t(), out_dtype=torch.float32)[:MOST_ROWS] for a, b in pairs]

    def few() -> list[Tensor]:
        some = rows[:MOST_ROWS]
        return [product(some, weight)] if parts == 1 else list(partial_products(some, weight, parts))

    return same(many, few, ulps=0)


def _shape(weight: Tensor, parts: int) -> ProductShape:
    outputs, inputs = weight.shape
    return ProductShape(weight.device, weight.dtype, outputs, inputs, parts)
