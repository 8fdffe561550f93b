"""Sequence parallelism: one packed row over several ranks (Ulysses, Jacobs et al. 2023).

Every rank of a process group runs the layers on its slice of the row. Attention needs all tokens, but not all
heads: before it the ranks exchange slices of tokens for slices of heads (all-to-all), and afterwards back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Slicing:
    """How a row of `length` tokens is cut: `width` for each rank of the group, the last ones padded."""

    group: dist.ProcessGroup
    rank: int
    size: int
    length: int = 0

    @property
    def width(self) -> int:
        return -(-self.length // self.size)

    def own(self, states: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Which of the places `states` of the row are in this rank's slice (their indices), and where in the
        slice."""
        width = -(-length // self.size)
        chosen = ((states >= self.rank * width) & (states < (self.rank + 1) * width)).nonzero().flatten()
        return chosen, states[chosen] - self.rank * width

    def joined(self, outputs: Tensor, chosen: Tensor, count: int) -> Tensor:
        """The outputs of all ranks [count, outputs], given this rank's; the gradient of each goes to the rank
        that computed it."""
        table = outputs.new_zeros(count, outputs.shape[1]).index_put((chosen,), outputs[: len(chosen)])
        # A rank whose slice has no output must take part in the backward pass all the same.
        total: Tensor = _Sum.apply(table + 0.0 * outputs.sum(), self.group)
        return total

    def slice(self, row: Tensor) -> Tensor:
        """This rank's slice of a row [..., length]."""
        padded = torch.nn.functional.pad(row, (0, self.width * self.size - self.length))
        return padded[..., self.rank * self.width : (self.rank + 1) * self.width]

    def attend(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """`attention` over the whole row and a share of the heads. query [1, H, width, D] -> [1, width, H,
        D]."""
        heads = query.shape[1]
        if heads % self.size:
            fitting = [size for size in range(1, heads + 1) if heads % size == 0]
            raise ValueError(
                f"ulysses_sequence_parallel_size={self.size} does not divide the {heads} attention heads of "
                f"the model. Set one of {fitting}."
            )
        if key.shape[1] % self.size:
            key = key.repeat_interleave(heads // key.shape[1], dim=1)
            value = value.repeat_interleave(heads // value.shape[1], dim=1)
        out = attention(self._to_heads(query), self._to_heads(key), self._to_heads(value))[0]
        padded = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, self.width * self.size - self.length))
        exchanged: Tensor = _Exchange.apply(padded, self.group, self.size, False)
        return exchanged[None]

    def _to_heads(self, states: Tensor) -> Tensor:
        """[1, H, width, D] of this rank's tokens -> [1, H / size, length, D] of this rank's heads."""
        exchanged: Tensor = _Exchange.apply(states[0].transpose(0, 1), self.group, self.size, True)
        return exchanged[: self.length].transpose(0, 1)[None]


def _exchange(tensor: Tensor, group: dist.ProcessGroup, size: int, to_heads: bool) -> Tensor:
    """[n, H, D] of this rank's tokens <-> [size n, H / size, D] of this rank's heads, by an all-to-all."""
    tokens, heads, depth = tensor.shape
    if to_heads:
        send = tensor.view(tokens, size, heads // size, depth).transpose(0, 1).contiguous()
    else:
        send = tensor.contiguous().view(size, tokens // size, heads, depth)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    if to_heads:
        return received.view(size * tokens, heads // size, depth)
    return received.transpose(0, 1).reshape(tokens // size, heads * size, depth)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, size: int, to_heads: bool) -> Tensor:
        ctx.group = group
        ctx.size = size
        ctx.to_heads = to_heads
        return _exchange(tensor, group, size, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.group, ctx.size, not ctx.to_heads), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = table.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Every rank of the group computes the same loss of the same table: its gradient is complete already.
        return gradient, None
