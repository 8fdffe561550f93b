"""The arithmetic of `logprobs.py` on some rows of logits: log-probs, entropies, and their derivatives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CACHED = 1 << 18  # numbers that stay in a CPU cache over several operations
FLOOR = -1e4  # stands for log 0 in p log p; exp of it is 0 in every dtype

RowNumbers = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Labels, normaliser, entropy, and the gradients of log-probs and entropy, of some rows."""


class RowStatistics:
    """One number of each kind per row, filled chunk by chunk."""

    def __init__(self, like: Tensor, want_entropy: bool):
        self.log_probs = torch.empty(len(like), dtype=arithmetic_dtype(like), device=like.device)
        self.entropy: Tensor | None = None
        if want_entropy:
            self.entropy = torch.empty_like(self.log_probs)
        # The largest z and the logarithm of Σ exp(z - largest). They are kept apart because their sum would
        # round small entropies away.
        self.normaliser = torch.empty(len(like), 2, dtype=arithmetic_dtype(like), device=like.device)

    def take(self, at: slice, found: tuple[Tensor, Tensor, Tensor | None]) -> None:
        """Store the results of the kernels."""
        log_probs, normaliser, entropy = found
        self.log_probs[at] = log_probs
        self.normaliser[at] = normaliser
        if self.entropy is not None and entropy is not None:
            self.entropy[at] = entropy

    def fill(self, at: slice, z: Tensor, labels: Tensor) -> None:
        """With s = z - max z and S = Σ exp(s): log π(a) = s_a - log S and H = log S - Σ s exp(s) / S, both
        terms positive."""
        largest = z.amax(-1, keepdim=True)
        shifted = z - largest
        chosen = shifted.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
        if self.entropy is None:
            log_total = shifted.exp_().sum(-1).log()
        else:
            powers = shifted.clamp_(min=FLOOR).exp()
            total = powers.sum(-1)
            log_total = total.log()
            self.entropy[at] = log_total - powers.mul_(shifted).sum(-1) / total
        self.log_probs[at] = (chosen - log_total).masked_fill(labels < 0, 0.0)
        self.normaliser[at] = torch.stack([largest.squeeze(-1), log_total], dim=-1)


def slope_of_rows(
    z: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """The derivative with respect to z of one chunk, given those with respect to its log-probs and
    entropies."""
    if grad_log_probs is not None:
        grad_log_probs = grad_log_probs.masked_fill(labels < 0, 0.0)[:, None]
    if grad_entropy is not None and entropy is not None:
        log_p = (z - normaliser[:, :1]).sub_(normaliser[:, 1:]).clamp_(min=FLOOR)
        p = log_p.exp()
        slope = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_log_probs is not None:
            slope.sub_(grad_log_probs)
        slope.mul_(p)
    elif grad_log_probs is not None:
        slope = (z - normaliser[:, :1]).sub_(normaliser[:, 1:]).exp_().mul_(-grad_log_probs)
    else:
        slope = torch.zeros_like(z)
    if grad_log_probs is not None:
        slope.scatter_add_(-1, labels.clamp(min=0)[:, None], grad_log_probs)
    return slope


def slopes_of_chunk(
    logits: Tensor, numbers: RowNumbers, temperature: float, dtype: torch.dtype, grad_bias: Tensor | None
) -> Tensor:
    """The derivative with respect to the logits of one chunk, in `dtype`; that of the bias is added to
    `grad_bias`."""
    narrow = torch.empty_like(logits, dtype=dtype)
    for part in cached_chunks(logits, len(logits)):
        rows = rows_at(part, *numbers)
        slope = slope_of_rows(scaled(logits[part], temperature), *rows).div_(temperature)
        if grad_bias is not None:
            grad_bias += slope.sum(0)
        narrow[part] = slope
    return narrow


def scaled(logits: Tensor, temperature: float) -> Tensor:
    z = logits.to(arithmetic_dtype(logits))
    if temperature != 1.0:
        z = z / temperature
    return z


def arithmetic_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which numbers are computed."""
    if tensor.dtype == torch.float64:
        return torch.float64
    return torch.float32


def rows_at(
    at: slice,
    labels: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> RowNumbers:
    """Some rows of each tensor that is given."""
    return (
        labels[at],
        normaliser[at],
        _optional_rows(at, entropy),
        _optional_rows(at, grad_log_probs),
        _optional_rows(at, grad_entropy),
    )


def _optional_rows(at: slice, tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor[at]


def cached_chunks(logits: Tensor, size: int) -> list[slice]:
    """At most `size` rows; on a CPU also no more than stay in its cache over several operations."""
    if logits.device.type == "cpu":
        size = min(size, max(CACHED // max(logits.shape[-1], 1), 1))
    return chunks(len(logits), size)


def cached_parts(logits: Tensor, at: slice) -> Iterator[tuple[slice, slice]]:
    """The rows of one chunk in parts that stay in the cache: as rows of the chunk, and of the batch."""
    for part in cached_chunks(logits, len(logits)):
        yield part, slice(at.start + part.start, at.start + part.stop)


def chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
