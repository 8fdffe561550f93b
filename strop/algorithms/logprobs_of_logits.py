"""Log-probs, entropies and Σ π² of tokens whose logits exist already, for heads that are more than a matrix
product. The arithmetic is that of logprobs.py, chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.algorithms.logprobs import (
    CHUNK,
    RowStatistics,
    TokenStatistics,
    arithmetic_dtype,
    cached_chunks,
    check_inputs,
    rows_at,
    scaled,
    shaped,
    slope_of_rows,
)


def token_statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    want_entropy: bool = False,
) -> TokenStatistics:
    """Log-probs of `labels` [...] under `logits` [..., V], and the entropies; both carry gradients to the
    logits."""
    check_inputs(logits, labels, "logits", temperature, chunk)
    rows = logits.reshape(-1, logits.shape[-1])
    log_probs, entropy = _FromLogits.apply(rows, labels.reshape(-1), temperature, chunk, want_entropy)
    return shaped(log_probs, entropy, labels)


def token_logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0, chunk: int = CHUNK) -> Tensor:
    """Log-probs of `labels` [...] under `logits` [..., V]."""
    return token_statistics(logits, labels, temperature=temperature, chunk=chunk).log_probs


def token_entropy(logits: Tensor, *, temperature: float = 1.0, chunk: int = CHUNK) -> Tensor:
    """H per position [...] from logits [..., V]; -inf logits are allowed."""
    nothing = torch.full(logits.shape[:-1], -1, dtype=torch.long, device=logits.device)
    found = token_statistics(logits, nothing, temperature=temperature, chunk=chunk, want_entropy=True).entropy
    assert found is not None
    return found


@torch.no_grad()
def sum_pi_squared(logits: Tensor, *, temperature: float = 1.0, chunk: int = CHUNK) -> Tensor:
    """Σ_v π_v² per position [...], the chance that two samples agree; without gradient."""
    rows = logits.reshape(-1, logits.shape[-1])
    out = torch.empty(len(rows), dtype=arithmetic_dtype(logits), device=logits.device)
    for at in cached_chunks(rows, chunk):
        out[at] = scaled(rows[at], temperature).softmax(-1).square_().sum(-1)
    return out.view(logits.shape[:-1])


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, chunk: int, want_entropy: bool
    ) -> Any:
        numbers = RowStatistics(logits, want_entropy)
        for at in cached_chunks(logits, chunk):
            numbers.fill(at, scaled(logits[at], temperature), labels[at])
        ctx.save_for_backward(logits, labels, numbers.normaliser, numbers.entropy)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return numbers.log_probs, numbers.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        logits, labels, normaliser, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for at in cached_chunks(logits, ctx.chunk):
            z = scaled(logits[at], ctx.temperature)
            rows = rows_at(at, labels, normaliser, entropy, grad_log_probs, grad_entropy)
            slope = slope_of_rows(z, *rows)
            if ctx.temperature != 1.0:
                slope.div_(ctx.temperature)
            grad[at] = slope
        return grad, None, None, None, None
