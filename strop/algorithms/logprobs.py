"""Log-probs of given tokens, and entropies, without a float32 copy of all logits.

A batch of N tokens over a vocabulary of V has N x V logits: at 32k tokens and V = 152k, 18 GiB in float32,
and as much again for a softmax kept for the backward pass. Here `chunk` rows at a time are computed in
float32 and only one number per row is kept; the backward pass computes the softmax of the chunk again. The
result is exact for any chunk size.

`token_logprobs_from_hidden` also computes the logits chunk by chunk from the last hidden states, so that they
never exist as a whole, neither forward nor backward (unless all of them fit in one chunk). Logits that exist
already are taken by logprobs_of_logits.py.

With z = logits / temperature and p = softmax(z):

    log π(a) = z_a - logsumexp(z)         H = -Σ p log p
    d log π(a) / dz = onehot(a) - p       dH / dz = -p (log p + H)

A label below zero (such as -100) is no token: its log-prob is 0 and has no gradient.

On a GPU with Triton, a chunk takes one kernel forward and one backward (logprob_kernels.py), and so it does
on a CPU with AVX-512 (logprob_kernels_cpu.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.algorithms.logprob_trial import RowFunctions, compiled_functions

CHUNK = 1024
CACHED = 1 << 18  # numbers that stay in a CPU cache over several operations
LARGE_VOCABULARY = 8192
FLOOR = -1e4  # stands for log 0 in p log p; exp of it is 0 in every dtype

RowNumbers = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Labels, normaliser, entropy, and the gradients of log-probs and entropy, of some rows."""


class TokenStatistics(NamedTuple):
    """Numbers per token, in the shape of the labels."""

    log_probs: Tensor  # [...] float32, of the labels
    entropy: Tensor | None  # [...] float32, with want_entropy


def shaped(log_probs: Tensor, entropy: Tensor | None, labels: Tensor) -> TokenStatistics:
    if entropy is not None:
        entropy = entropy.view(labels.shape)
    return TokenStatistics(log_probs.view(labels.shape), entropy)


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
    check_inputs(hidden, labels, "hidden", temperature, chunk)
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
    return shaped(log_probs, entropy, labels)


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
        kernels = compiled_for(hidden, weight)
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
        kernels = compiled_for(hidden, weight)
        for at in chunks(len(hidden), ctx.chunk):
            # Kernels may write the slopes over the logits; a second backward pass computes them again.
            logits, ctx.logits = ctx.logits, None
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
                grad_weight = add_product(grad_weight, narrow.T, hidden[at], exact)
            del narrow
        if wants_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, cast_like(grad_weight, weight), cast_like(grad_bias, bias), None, None, None, None


def compiled_for(hidden: Tensor, weight: Tensor) -> RowFunctions | None:
    """Compiled functions, if they run on the device and agree with this file."""
    # With fewer tokens nothing need be compiled on a CPU.
    worth_it = hidden.is_cuda or (hidden.device.type == "cpu" and len(weight) >= LARGE_VOCABULARY)
    if not worth_it or hidden.dtype == torch.float64:
        return None
    dtype = torch.float32 if hidden.is_cuda else hidden.dtype
    return compiled_functions(hidden.device, dtype, _PlainRows())


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


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
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


def cast_like(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    if gradient is None or like is None:
        return gradient
    return gradient.to(like.dtype)


def check_inputs(features: Tensor, labels: Tensor, name: str, temperature: float, chunk: int) -> None:
    if features.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} but {name} has shape {tuple(features.shape)}; labels "
            f"must have the shape {tuple(features.shape[:-1])}, one token per row."
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    if chunk < 1:
        raise ValueError(f"chunk is a number of rows and must be at least 1, got {chunk}.")


# --- the arithmetic on some rows of logits ------------------------------------------------------------------


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


@dataclass(frozen=True)
class _PlainRows:
    """The functions of this file, as those that are compiled are called."""

    def statistics(
        self, logits: Tensor, labels: Tensor, *, temperature: float, want_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        numbers = RowStatistics(logits, want_entropy)
        numbers.fill(slice(0, len(logits)), scaled(logits, temperature), labels)
        return numbers.log_probs, numbers.normaliser, numbers.entropy

    def slopes(
        self, logits: Tensor, *numbers: Tensor | None, temperature: float, dtype: torch.dtype
    ) -> Tensor:
        return slopes_of_chunk(logits, cast(RowNumbers, numbers), temperature, dtype, None)


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
