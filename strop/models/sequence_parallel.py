"""One packed row over several ranks (Ulysses, Jacobs et al. 2023).

Every rank of a group runs the layers on its slice of the row. Attention needs all tokens, but not all heads: before it the
ranks trade slices of tokens for slices of heads, and afterwards back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from strop.models.layout import Inputs


@dataclass(frozen=True)
class Slicing:
    """How a row of `length` tokens is cut: `width` for each rank of the group, the last ones padded."""

    group: Any
    rank: int
    size: int
    length: int = 0

    @property
    def width(self) -> int:
        return -(-self.length // self.size)

    def cut(self, inputs: Inputs) -> Inputs:
        """The slice of the row that this rank computes."""
        assert inputs.packing is not None, "only a packed row is cut"
        mine = dataclasses.replace(self, length=inputs.ids.shape[1])
        return dataclasses.replace(
            inputs,
            ids=mine._slice(inputs.ids),
            positions=mine._slice(inputs.positions),
            packing=dataclasses.replace(inputs.packing, slicing=mine),
        )

    def own(self, states: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Which of the places `states` of the row lie in this rank's slice (their numbers), and where in the slice."""
        width = -(-length // self.size)
        chosen = ((states >= self.rank * width) & (states < (self.rank + 1) * width)).nonzero().flatten()
        return chosen, states[chosen] - self.rank * width

    def joined(self, answers: Tensor, chosen: Tensor, count: int) -> Tensor:
        """The answers of all ranks [count, answers], given this rank's; the gradient of each goes to whoever computed it."""
        table = answers.new_zeros(count, answers.shape[1]).index_put((chosen,), answers[: len(chosen)])
        # A rank whose slice has no answer must take part in the backward pass all the same.
        return _Sum.apply(table + 0.0 * answers.sum(), self.group)

    def _slice(self, row: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(row, (0, self.width * self.size - self.length))
        return padded[:, self.rank * self.width : (self.rank + 1) * self.width]

    def attend(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """`attention` over the whole row and a share of the heads. query [1, H, width, D] -> [1, width, H, D]."""
        heads = query.shape[1]
        if heads % self.size:
            raise ValueError(
                f"ulysses_sequence_parallel_size={self.size} does not divide the {heads} attention heads of the model. "
                f"Set one of {[size for size in range(1, heads + 1) if heads % size == 0]}."
            )
        if key.shape[1] % self.size:
            key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (key, value))
        whole = [
            _Trade.apply(part[0].transpose(0, 1), self.group, self.size, True)[: self.length].transpose(0, 1)[None]
            for part in (query, key, value)
        ]
        out = attention(*whole)[0]  # [length, H / size, D]
        padded = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, self.width * self.size - self.length))
        traded: Tensor = _Trade.apply(padded, self.group, self.size, False)
        return traded[None]


def _trade(tensor: Tensor, group: Any, size: int, to_heads: bool) -> Tensor:
    """[n, H, D] of my tokens <-> [size n, H / size, D] of my heads."""
    if to_heads:
        tokens, heads, depth = tensor.shape
        send = tensor.view(tokens, size, heads // size, depth).transpose(0, 1).contiguous()
    else:
        tokens, heads, depth = tensor.shape[0] // size, tensor.shape[1] * size, tensor.shape[2]
        send = tensor.contiguous().view(size, tokens, heads // size, depth)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    if to_heads:
        return received.view(size * tokens, heads // size, depth)
    return received.transpose(0, 1).reshape(tokens, heads, depth)


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, size: int, to_heads: bool) -> Tensor:
        ctx.facts = group, size, to_heads
        return _trade(tensor, group, size, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        group, size, to_heads = ctx.facts
        return _trade(gradient, group, size, not to_heads), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, group: Any) -> Tensor:
        total = table.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Every rank of the group computes the same loss of the same table: its gradient is complete here already.
        return gradient, None
