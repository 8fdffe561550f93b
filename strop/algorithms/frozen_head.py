"""Log-probs of given tokens under a frozen output head on a CPU, with each product computed once.

Where the logits do not fit in one chunk, `token_logprobs_from_hidden` computes them a second time for the
backward pass, because its slopes depend on the gradients of log-probs and entropies. If the head is frozen
and entropies have no gradient, the gradient of a row is the gradient of its log-prob times

    d log π(a) / d hidden = (onehot(a) - p) @ weight / temperature

which is known in the forward pass. So it is computed there, from the logits that exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.algorithms.logprob_trial import RowFunctions
from strop.algorithms.logprobs import (
    CHUNK,
    FLOOR,
    TokenStatistics,
    cached_parts,
    chunks,
    compiled_for,
    token_logprobs_from_hidden,
)


def frozen_head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    want_entropy: bool = False,
) -> TokenStatistics:
    """`token_logprobs_from_hidden` of rows `hidden` [n, H], whose entropies have no gradient. Where it is
    faster, the same numbers as this file computes them."""
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    on_cpu = hidden.device.type == "cpu" and hidden.dtype == weight.dtype
    kernels = compiled_for(hidden, weight)
    takes = on_cpu and (hidden.dtype == torch.float32 or kernels is not None)
    if trained or not takes or not hidden.requires_grad or len(hidden) <= chunk:
        return token_logprobs_from_hidden(
            hidden,
            weight,
            labels,
            bias=bias,
            temperature=temperature,
            chunk=chunk,
            want_entropy=want_entropy,
        )
    options = _HeadOptions(temperature, chunk, want_entropy, kernels)
    log_probs, entropy = _FromFrozenHead.apply(hidden, weight, bias, labels, options)
    return TokenStatistics(log_probs, entropy)


@dataclass(frozen=True)
class _HeadOptions:
    temperature: float
    chunk: int
    """Rows of logits that exist at a time."""
    want_entropy: bool
    kernels: RowFunctions | None


class _Rows:
    """Numbers of all rows, and memory for the logits of one chunk: memory that a chunk gave back would have
    to be mapped again for the next one."""

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor, options: _HeadOptions) -> None:
        self.labels = labels
        self.temperature = options.temperature
        self._kernels = options.kernels
        self.logits = hidden.new_empty(min(len(hidden), options.chunk), len(weight))
        self.log_probs = torch.empty(len(hidden), dtype=torch.float32)
        self.entropy: Tensor | None = None
        if options.want_entropy:
            self.entropy = torch.empty_like(self.log_probs)
        self._powers = self.logits.new_empty(0)

    def replace_by_slopes(self, logits: Tensor, at: slice) -> None:
        """Store the numbers of some rows, and turn their logits into the derivatives of their log-probs."""
        if self._kernels is None:
            for part, row in cached_parts(logits, at):
                self._replace_in_cache(logits[part], row)
            return
        labels = self.labels[at]
        want_entropy = self.entropy is not None
        temperature = self.temperature
        found = self._kernels.statistics(logits, labels, temperature=temperature, want_entropy=want_entropy)
        self.log_probs[at], normaliser, entropy = found
        if self.entropy is not None and entropy is not None:
            self.entropy[at] = entropy
        ones = torch.ones(len(labels), dtype=torch.float32)
        slopes = self._kernels.slopes(
            logits, labels, normaliser, None, ones, None, temperature=temperature, dtype=logits.dtype
        )
        assert slopes is logits

    def _replace_in_cache(self, z: Tensor, at: slice) -> None:
        """The same in plain torch, as RowStatistics.fill computes it. Every pass over the logits `z` works in
        place, in the cache."""
        labels = self.labels[at]
        chosen = labels.clamp(min=0)[:, None]
        counts = (labels >= 0).to(z.dtype)
        if self.temperature != 1.0:
            z.div_(self.temperature)
        z.sub_(z.amax(-1, keepdim=True))
        log_probs = z.gather(-1, chosen).squeeze(-1)
        if self.entropy is not None:
            z.clamp_(min=FLOOR)
        if self._powers.shape != z.shape:
            self._powers = torch.empty_like(z)
        powers = torch.exp(z, out=self._powers)
        total = powers.sum(-1)
        log_total = total.log()
        if self.entropy is not None:
            self.entropy[at] = log_total - z.mul_(powers).sum(-1) / total
        self.log_probs[at] = (log_probs - log_total).masked_fill(labels < 0, 0.0)
        up = counts / self.temperature
        torch.mul(powers, -(up / total)[:, None], out=z)
        z.scatter_add_(-1, chosen, up[:, None])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    torch.mm(hidden, weight.t(), out=out)
    if bias is not None:
        out.add_(bias)
    return out


class _FromFrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: _HeadOptions,
    ) -> Any:
        rows = _Rows(hidden, weight, labels, options)
        gradient = torch.empty_like(hidden)
        for at in chunks(len(hidden), options.chunk):
            logits = _logits(hidden[at], weight, bias, rows.logits[: at.stop - at.start])
            rows.replace_by_slopes(logits, at)
            torch.mm(logits, weight, out=gradient[at])
        ctx.save_for_backward(gradient)
        ctx.set_materialize_grads(False)
        if rows.entropy is not None:
            ctx.mark_non_differentiable(rows.entropy)
        return rows.log_probs, rows.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        (gradient,) = ctx.saved_tensors
        grad_hidden = None
        if grad_log_probs is not None:
            grad_hidden = gradient * grad_log_probs[:, None].to(gradient.dtype)
        return grad_hidden, None, None, None, None
