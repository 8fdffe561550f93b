"""Log-probs of several tokens per position: the likeliest ones of a teacher, and a student's of the same.

Like logprobs.py, `chunk` rows of logits exist at a time and are computed again in the backward pass. With
z = logits / temperature, p = softmax(z) and gradients g_k of the log-probs of the tokens i_k:

    log pi(i_k) = z_(i_k) - logsumexp(z)        d / dz = sum_k g_k (onehot(i_k) - p)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.algorithms.logprobs import (
    CHUNK,
    add_product,
    arithmetic_dtype,
    cast_like,
    chunks,
    head_logits,
    scaled,
)


@torch.no_grad()
def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Ids [n, count] and log-probs [n, count] of the likeliest tokens after the states `hidden` [n, H],
    without gradient."""
    head, shift = _in_dtype(hidden, weight, bias)
    ids, log_probs = [], []
    for at in chunks(len(hidden), chunk) or [slice(0, 0)]:
        found = top_of_logits(head_logits(hidden[at], head, shift), count, temperature=temperature)
        ids.append(found[0])
        log_probs.append(found[1])
    return torch.cat(ids), torch.cat(log_probs)


def top_of_logits(logits: Tensor, count: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same of logits [n, V]."""
    if not 0 < count <= logits.shape[-1]:
        raise ValueError(f"The {count} likeliest tokens of a vocabulary of {logits.shape[-1]} do not exist.")
    z = scaled(logits, temperature)
    values, ids = z.topk(count, dim=-1)
    return ids, values - z.logsumexp(-1, keepdim=True)


def log_probs_of_tokens(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """Log-probs [n, k] of the tokens `ids` [n, k] after the states `hidden` [n, H], in float32. Gradients
    flow to hidden, weight and bias where they want one."""
    if ids.dim() != 2 or len(ids) != len(hidden):
        raise ValueError(f"ids have shape {tuple(ids.shape)}; with {len(hidden)} states they must be [n, k].")
    head, shift = _in_dtype(hidden, weight, bias)
    found: Tensor = _OfTokens.apply(hidden, head, shift, ids, temperature, chunk)
    return found


def log_probs_in_logits(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """The same of logits [n, V]."""
    z = scaled(logits, temperature)
    return z.gather(-1, ids) - z.logsumexp(-1, keepdim=True)


def known_tokens(ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """A teacher's tokens `ids` [..., k] with 0 in the place of those that a policy with this vocabulary does
    not have, and where these are. Models of one family are padded to different sizes, so there may be some;
    refused is a position without any other."""
    foreign = ids >= vocabulary
    lost = foreign.all(-1)
    if bool(lost.any()):
        raise ValueError(
            f"None of the teacher's likeliest tokens at a position, {ids[lost][0].tolist()[:4]}, is one of "
            f"the policy's {vocabulary}: the teacher has another tokenizer. Choose one of the same family."
        )
    return ids.masked_fill(foreign, 0), foreign


def _in_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)


class _OfTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        exact = arithmetic_dtype(hidden)
        found = torch.empty(ids.shape, dtype=exact, device=hidden.device)
        totals = torch.empty(len(ids), 1, dtype=exact, device=hidden.device)
        for at in chunks(len(hidden), chunk):
            z = scaled(head_logits(hidden[at], weight, bias), temperature)
            totals[at] = z.logsumexp(-1, keepdim=True)
            found[at] = z.gather(-1, ids[at]) - totals[at]
        ctx.save_for_backward(hidden, weight, bias, ids, totals)
        ctx.temperature = temperature
        ctx.chunk = chunk
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight, bias, ids, totals = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        exact = arithmetic_dtype(hidden)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=exact) if wants_bias else None
        for at in chunks(len(hidden), ctx.chunk):
            z = scaled(head_logits(hidden[at], weight, bias), ctx.temperature)
            slope = z.sub(totals[at]).exp_().mul_(-gradient[at].sum(-1, keepdim=True))
            del z
            slope.scatter_add_(-1, ids[at], gradient[at]).div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            narrow = slope.to(hidden.dtype)
            del slope
            if grad_hidden is not None:
                grad_hidden[at] = narrow @ weight
            if wants_weight:
                grad_weight = add_product(grad_weight, narrow.T, hidden[at], exact)
            del narrow
        if wants_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, cast_like(grad_weight, weight), cast_like(grad_bias, bias), None, None, None
