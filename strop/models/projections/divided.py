"""stream + states @ weight.T on a GPU, with the same bits for any number of rows.

cuBLAS sums over the inner dimension in one order as long as the output has enough tiles for all
multiprocessors. A product with few rows and a long inner dimension (the ends of a layer's branches, in a
decode step) has not: cuBLAS then divides the sum by a number that depends on the rows, and a token gets other
bits in sampling than in training. So products with a long inner dimension are always two: that of the first
half of the inner dimension and that of the second, each rounded to float32 and added to the stream in this
order. Few rows compute both in one batched product; many rows compute one after the other.
`benchmarks/agreement.py` measures that the bits are equal and what it costs.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from strop.extras import MissingExtra, require
from strop.models.projections import few_rows

LONG = 2048
"""Inner dimension from which cuBLAS was seen to divide sums; 1,536 was not."""
_WIDE = 8192
"""Outputs so wide have tiles for all multiprocessors with any number of rows."""
_FEW_ROWS = 512
"""Up to so many rows one batched product is faster than two. Two products alone have equal bits from 320 rows
on."""


@cache
def _kernels() -> ModuleType | None:
    try:
        return require("strop.models.kernels", extra="gpu", why="Fast training on a GPU")
    except MissingExtra:
        return None


def divides(inner: int) -> bool:
    """Whether products with this inner dimension are computed as two."""
    return inner >= LONG and inner % 16 == 0


def divides_linear(weight: Tensor) -> bool:
    """Whether a linear layer with this weight is computed as two products, and in float32."""
    return divides(weight.shape[1]) and len(weight) < _WIDE


def start_of(weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """A float32 stream [rows, out] to add a linear layer to: its bias or zeros."""
    if bias is None:
        return torch.zeros(rows, len(weight), dtype=torch.float32, device=weight.device)
    return bias.float().expand(rows, -1).contiguous()


def linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of 16-bit states on a GPU, without gradients."""
    rows = states.reshape(-1, states.shape[-1])
    if not divides_linear(weight):
        return F.linear(states, weight, bias)
    total = add_wide(start_of(weight, bias, len(rows)), rows, weight, in_place=True)
    return total.to(states.dtype).view(*states.shape[:-1], -1)


class DividedLinear(nn.Linear):
    """A linear layer of 16-bit weights on a GPU that is always computed as two products; trains."""

    def forward(self, states: Tensor) -> Tensor:
        narrow = states.dtype == self.weight.dtype in (torch.bfloat16, torch.float16)
        if isinstance(self.weight, DTensor) or not states.is_cuda or not narrow:
            return super().forward(states)
        rows = states.reshape(-1, states.shape[-1])
        found: Tensor = _Divided.apply(rows, self.weight, self.bias)
        return found.view(*states.shape[:-1], -1)


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        missing = -rows.shape[1] % 16  # zeros, so that both halves begin at multiples of 16 bytes
        wide = (F.pad(rows, (0, missing)), F.pad(weight, (0, missing))) if missing else (rows, weight)
        return add_wide(start_of(weight, bias, len(rows)), *wide, in_place=True).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            above @ weight if wants_rows else None,
            above.t() @ rows if wants_weight else None,
            above.sum(0) if wants_bias else None,
        )


def add_wide(stream: Tensor, rows: Tensor, weight: Tensor, *, in_place: bool = False) -> Tensor:
    """float32 `stream` [N, out] + 16-bit `rows` [N, in] @ `weight` [out, in].T, without gradients."""
    inner = rows.shape[1]
    out = stream if in_place else None
    if not divides(inner):
        return torch.addmm(stream, rows, weight.t(), out_dtype=stream.dtype, out=out)
    half = inner // 2
    if len(rows) > _FEW_ROWS:
        first = torch.addmm(stream, rows[:, :half], weight[:, :half].t(), out_dtype=stream.dtype, out=out)
        return torch.addmm(first, rows[:, half:], weight[:, half:].t(), out_dtype=stream.dtype, out=first)
    if few_rows.takes(rows, weight, parts=2):
        both = few_rows.partial_products(rows, weight, parts=2)
    else:
        both = torch.bmm(
            rows.unflatten(1, (2, half)).transpose(0, 1),
            weight.unflatten(1, (2, half)).permute(1, 2, 0),
            out_dtype=torch.float32,
        )
    kernels = _kernels()
    if kernels is not None and stream.is_contiguous():
        added: Tensor = kernels.add_in_order(stream, both, in_place=in_place)
        return added
    return torch.add(stream, both[0], out=out).add_(both[1])
