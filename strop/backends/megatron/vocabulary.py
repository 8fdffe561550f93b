"""Log-probs and entropies where every tensor-parallel rank has some rows of the output head.

Each rank computes the logits of its own tokens. What is summed over ranks is one number per row: the largest
logit, the sum of exponentials, the logit of the label, and the term of the entropy. No rank ever has a row of
all logits. See algorithms/logprobs.py for the formulas; a chunk of rows exists at a time here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.algorithms.logprobs import FLOOR, chunks, head_logits, scaled


@dataclass(frozen=True)
class VocabularyShare:
    """The tokens of this rank: `first` and the `count` - 1 after it."""

    group: dist.ProcessGroup
    first: int
    count: int

    def sum(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers, group=self.group)
        return numbers


@dataclass
class _Chunk:
    """Numbers of some rows over the whole vocabulary."""

    log_probs: Tensor
    entropy: Tensor
    largest: Tensor
    log_total: Tensor
    squares: Tensor


def vocabulary_statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, share: VocabularyShare, temperature: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the labels, entropies, and Σ π² (no gradient), each [n]. `hidden` [n, H] is the same on
    all ranks of the group; `weight` are this rank's rows of the head."""
    found: tuple[Tensor, Tensor, Tensor] = _FromShare.apply(hidden, weight, labels, share, temperature, chunk)
    return found


def _own_logits(hidden: Tensor, weight: Tensor, share: VocabularyShare, temperature: float) -> Tensor:
    """Without the padding of the vocabulary."""
    return scaled(head_logits(hidden, weight[: share.count]), temperature)


def _statistics(z: Tensor, labels: Tensor, share: VocabularyShare) -> _Chunk:
    largest = torch.full((len(z),), float("-inf"), dtype=z.dtype, device=z.device)
    if z.shape[1]:
        largest = z.amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=share.group)
    shifted = (z - largest[:, None]).clamp_(min=FLOOR)
    powers = shifted.exp()
    chosen, inside = _chosen(shifted, labels, share)
    sums = torch.stack(
        [
            powers.sum(-1),
            (powers * shifted).sum(-1),
            powers.square().sum(-1),
            chosen * inside,
        ]
    )
    total, weighted, squared, own = share.sum(sums)
    log_total = total.log()
    return _Chunk(
        (own - log_total).masked_fill(labels < 0, 0.0),
        log_total - weighted / total,
        largest,
        log_total,
        squared / total.square(),
    )


def _chosen(values: Tensor, labels: Tensor, share: VocabularyShare) -> tuple[Tensor, Tensor]:
    """The entry of each row at its label, and whether the label is on this rank."""
    place = labels - share.first
    inside = (place >= 0) & (place < share.count)
    if not values.shape[1]:
        return torch.zeros(len(values), dtype=values.dtype, device=values.device), inside
    return values.gather(-1, place.where(inside, 0)[:, None]).squeeze(-1), inside


class _FromShare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        share: VocabularyShare,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: list[_Chunk] = []
        for at in chunks(len(hidden), chunk):
            z = _own_logits(hidden[at], weight, share, temperature)
            found.append(_statistics(z, labels[at], share))
        numbers = [torch.cat([getattr(part, name) for part in found]) for name in vars(found[0])]
        log_probs, entropy, largest, log_total, squares = numbers
        ctx.save_for_backward(hidden, weight, labels, largest, log_total, entropy)
        ctx.share = share
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.mark_non_differentiable(squares)
        ctx.set_materialize_grads(False)
        return log_probs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: object) -> Any:
        hidden, weight, labels, largest, log_total, entropy = ctx.saved_tensors
        share: VocabularyShare = ctx.share
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for at in chunks(len(hidden), ctx.chunk):
            z = _own_logits(hidden[at], weight, share, ctx.temperature)
            log_p = (z - largest[at, None] - log_total[at, None]).clamp_(min=FLOOR)
            p = log_p.exp()
            slope = torch.zeros_like(z)
            if grad_entropy is not None:
                slope -= grad_entropy[at, None] * p * (log_p + entropy[at, None])
            if grad_log_probs is not None:
                above = grad_log_probs[at].masked_fill(labels[at] < 0, 0.0)
                slope -= above[:, None] * p
                place = labels[at] - share.first
                inside = (place >= 0) & (place < share.count)
                if z.shape[1]:
                    slope.scatter_add_(-1, place.where(inside, 0)[:, None], (above * inside)[:, None])
            narrow = slope.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[at] = (narrow @ weight[: share.count]).float()
            grad_weight[: share.count] += (narrow.T @ hidden[at]).float()
        share.sum(grad_hidden)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None, None
