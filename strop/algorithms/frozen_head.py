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

from strop.algorithms.logprobs import (
    CHUNK,
    RowStatistics,
    TokenStatistics,
    cached_parts,
    chunks,
    head_logits,
    scaled,
    slope_of_rows,
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
    on_cpu = hidden.device.type == "cpu" and hidden.dtype == weight.dtype == torch.float32
    if trained or not on_cpu or not hidden.requires_grad or len(hidden) <= chunk:
        return token_logprobs_from_hidden(
            hidden,
            weight,
            labels,
            bias=bias,
            temperature=temperature,
            chunk=chunk,
            want_entropy=want_entropy,
        )
    options = _HeadOptions(temperature, chunk, want_entropy)
    log_probs, entropy = _FromFrozenHead.apply(hidden, weight, bias, labels, options)
    return TokenStatistics(log_probs, entropy)


@dataclass(frozen=True)
class _HeadOptions:
    temperature: float
    chunk: int
    """Rows of logits that exist at a time."""
    want_entropy: bool


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
        temperature = options.temperature
        numbers = RowStatistics(hidden, options.want_entropy)
        gradient = torch.empty_like(hidden)
        one = hidden.new_ones(1)
        for at in chunks(len(hidden), options.chunk):
            logits = head_logits(hidden[at], weight, bias)
            for part, row in cached_parts(logits, at):
                z = scaled(logits[part], temperature)
                numbers.fill(row, z, labels[row])
                up = one.expand(len(z))
                slope = slope_of_rows(z, labels[row], numbers.normaliser[row], None, up, None)
                logits[part] = slope.div_(temperature)
            torch.mm(logits, weight, out=gradient[at])
            del logits  # otherwise two chunks would exist at a time
        ctx.save_for_backward(gradient)
        ctx.set_materialize_grads(False)
        if numbers.entropy is not None:
            ctx.mark_non_differentiable(numbers.entropy)
        return numbers.log_probs, numbers.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        (gradient,) = ctx.saved_tensors
        grad_hidden = None
        if grad_log_probs is not None:
            grad_hidden = gradient * grad_log_probs[:, None]
        return grad_hidden, None, None, None, None
