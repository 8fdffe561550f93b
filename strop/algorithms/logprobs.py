"""Log-probs of given tokens, and entropies, without a float32 copy of all logits.

A batch of N tokens over a vocabulary of V has N x V logits: at 32k tokens and V = 152k, 18 GiB in float32,
and as much again for a softmax kept for the backward pass. Here `chunk` rows at a time are computed in
float32 and only one number per row is kept; the backward pass computes the softmax of the chunk again. The
result is exact for any chunk size.

`token_logprobs_from_hidden` also computes the logits chunk by chunk from the last hidden states, so that they
never exist as a whole, neither forward nor backward (unless all of them fit in one chunk).

With z = logits / temperature and p = softmax(z):

    log π(a) = z_a - logsumexp(z)         H = -Σ p log p
    d log π(a) / dz = onehot(a) - p       dH / dz = -p (log p + H)

A label below zero (such as -100) is no token: its log-prob is 0 and has no gradient.

On a GPU with Triton, a chunk takes one kernel forward and one backward (logprob_kernels.py).
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.algorithms.logprob_rows import (
    RowStatistics,
    arithmetic_dtype,
    cached_chunks,
    cached_parts,
    chunks,
    rows_at,
    scaled,
    slope_of_rows,
    slopes_of_chunk,
)
from strop.extras import MissingExtra, require

CHUNK = 1024


class TokenStatistics(NamedTuple):
    """Numbers per token, in the shape of the labels."""

    log_probs: Tensor  # [...] float32, of the labels
    entropy: Tensor | None  # [...] float32, with want_entropy


def _shaped(log_probs: Tensor, entropy: Tensor | None, labels: Tensor) -> TokenStatistics:
    if entropy is not None:
        entropy = entropy.view(labels.shape)
    return TokenStatistics(log_probs.view(labels.shape), entropy)


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
    _check(logits, labels, "logits", temperature, chunk)
    rows = logits.reshape(-1, logits.shape[-1])
    log_probs, entropy = _FromLogits.apply(rows, labels.reshape(-1), temperature, chunk, want_entropy)
    return _shaped(log_probs, entropy, labels)


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


def token_logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    want_entropy: bool = False,
) -> TokenStatistics:
    """`token_statistics` of the logits `hidden @ weight.T + bias`, which are never held for more than one
    chunk of rows.

    `hidden` [..., H], `weight` [V, H], `bias` [V], `labels` [...]. The product is taken of numbers in the
    dtype of `hidden`, as the model's own head would; everything after it in float32. Gradients flow to
    hidden, weight and bias where they want one.
    """
    _check(hidden, labels, "hidden", temperature, chunk)
    if weight.dim() != 2 or weight.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; with hidden {tuple(hidden.shape)} it must be [V, "
            f"{hidden.shape[-1]}]."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)} but weight has shape {tuple(weight.shape)}; it must be [V]."
        )
    rows = hidden.reshape(-1, hidden.shape[-1])
    head = weight.to(hidden.dtype)
    if bias is not None:
        bias = bias.to(hidden.dtype)
    log_probs, entropy = _FromHidden.apply(
        rows, head, bias, labels.reshape(-1), temperature, chunk, want_entropy
    )
    return _shaped(log_probs, entropy, labels)


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


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk: int,
        want_entropy: bool,
    ) -> Any:
        numbers = RowStatistics(hidden, want_entropy)
        logits = None
        kernels = _kernels(hidden)
        for at in chunks(len(hidden), chunk):
            del logits  # otherwise two chunks would exist at a time
            logits = head_logits(hidden[at], weight, bias)
            if kernels is not None:
                found = kernels.statistics(
                    logits, labels[at], temperature=temperature, want_entropy=want_entropy
                )
                numbers.take(at, found)
                continue
            for part, row in cached_parts(logits, at):
                numbers.fill(row, scaled(logits[part], temperature), labels[row])
        # If there is only one chunk, it is kept, so that the backward pass need not compute it again.
        ctx.logits = None
        if len(hidden) <= chunk:
            ctx.logits = logits
        ctx.save_for_backward(hidden, weight, bias, labels, numbers.normaliser, numbers.entropy)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return numbers.log_probs, numbers.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        exact = arithmetic_dtype(hidden)
        grad_hidden: Tensor | None = None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        if wants_hidden:
            grad_hidden = torch.empty_like(hidden)
        if wants_bias:
            grad_bias = torch.zeros_like(bias, dtype=exact)
        kernels = _kernels(hidden)
        for at in chunks(len(hidden), ctx.chunk):
            logits = ctx.logits
            if logits is None:
                logits = head_logits(hidden[at], weight, bias)
            numbers = rows_at(at, labels, normaliser, entropy, grad_log_probs, grad_entropy)
            if kernels is not None and grad_bias is None:
                narrow = kernels.slopes(logits, *numbers, temperature=ctx.temperature, dtype=hidden.dtype)
            else:
                narrow = slopes_of_chunk(logits, numbers, ctx.temperature, hidden.dtype, grad_bias)
            del logits
            if grad_hidden is not None:
                grad_hidden[at] = narrow @ weight
            if wants_weight:
                grad_weight = _add_product(grad_weight, narrow.T, hidden[at], exact)
            del narrow
        if wants_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, _cast(grad_weight, weight), _cast(grad_bias, bias), None, None, None, None


def _kernels(hidden: Tensor) -> ModuleType | None:
    """The kernels of logprob_kernels.py, if they run on the device and agree with this file."""
    if hidden.is_cuda and hidden.dtype != torch.float64:
        return _tried(hidden.device)
    return None


@cache
def _tried(device: torch.device) -> ModuleType | None:
    try:
        kernels = require(
            "strop.algorithms.logprob_kernels", extra="gpu", why="The fast output head on a GPU"
        )
        if kernels_agree(kernels, device):
            return kernels
        reason = "they do not give the numbers of plain torch on this device"
    except MissingExtra as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a compiler may refuse in many ways; plain torch always works
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    warnings.warn(
        f"The kernels of the output head are off, which makes updates slower: {reason}.", stacklevel=3
    )
    return None


@torch.no_grad()
def kernels_agree(kernels: ModuleType, device: torch.device) -> bool:
    """Whether the kernels give the numbers of this file, on rows that contain every special case."""
    draw = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, 9001, generator=draw)).to(device)
    logits[1, 7] = float("-inf")
    labels = torch.tensor([0, 9000, -100, 4095, 4096, 3], device=device)
    up = torch.randn(6, generator=draw).to(device)
    up_entropy = torch.randn(6, generator=draw).to(device)
    z = logits / 0.7
    numbers = RowStatistics(logits, True)
    numbers.fill(slice(0, 6), z, labels)
    expected = [numbers.log_probs, numbers.normaliser, numbers.entropy]
    expected.append(slope_of_rows(z, labels, numbers.normaliser, numbers.entropy, up, up_entropy).div_(0.7))
    found = list(kernels.statistics(logits, labels, temperature=0.7, want_entropy=True))
    found.append(
        kernels.slopes(logits, labels, *found[1:], up, up_entropy, temperature=0.7, dtype=torch.float32)
    )
    return all(
        torch.allclose(a, b, rtol=2e-5, atol=2e-5)
        for a, b in zip(expected, found, strict=True)
        if a is not None
    )


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden @ weight.T + bias for rows [n, H], without gradient.

    On a GPU, products of 16-bit numbers are returned in float32, in which they are summed: bf16 has steps of
    1/8 at the usual size of a logit, which alone would change a log-prob by 0.02.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
            logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            if bias is not None:
                logits.add_(bias)
            return logits
        return torch.nn.functional.linear(hidden, weight, bias)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b in `dtype`, because it is summed over many chunks. 16-bit numbers on a GPU are added by
    the matrix product, which sums in float32 anyway."""
    wide = a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)
    if total is None and wide:
        return torch.mm(a, b, out_dtype=torch.float32)
    if total is None:
        return (a @ b).to(dtype)
    if wide:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b
    return total


def _cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    if gradient is None or like is None:
        return gradient
    return gradient.to(like.dtype)


def _check(features: Tensor, labels: Tensor, name: str, temperature: float, chunk: int) -> None:
    if features.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} but {name} has shape {tuple(features.shape)}; labels "
            f"must have the shape {tuple(features.shape[:-1])}, one token per row."
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    if chunk < 1:
        raise ValueError(f"chunk is a number of rows and must be at least 1, got {chunk}.")
