"""Log-probs of given tokens, and entropies, without a float32 copy of all logits.

A batch of N tokens over a vocabulary of V has N x V logits: at 32k tokens and V = 152k, 18 GiB in float32, and as much again
for a softmax kept for the backward pass. Here rows are taken `chunk` at a time in float32 and nothing but one number per row
is kept; the backward pass computes the chunk's softmax again. The result is exact, whatever the chunk.

`token_logprobs_from_hidden` goes one step further and computes the logits themselves chunk by chunk from the last hidden
states, so that they never exist as a whole, neither forward nor backward (unless all of them fit in one chunk).

With z = logits / temperature and p = softmax(z):

    log π(a) = z_a - logsumexp(z)         H = -Σ p log p
    d log π(a) / dz = onehot(a) - p       dH / dz = -p (log p + H)

A label below zero (such as -100) is no token: its log-prob is 0 and has no gradient.

On a GPU with Triton, the passes over a chunk are one kernel each way (row_kernels.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.extras import MissingExtra, require

CHUNK = 1024
CACHED = 1 << 18  # numbers
FLOOR = -1e4  # stands for log 0 in p log p; exp of it is 0 in every dtype


class TokenStatistics(NamedTuple):
    log_probs: Tensor  # [...] float32, of the labels
    entropy: Tensor | None  # [...] float32, when asked for


def token_statistics(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, chunk: int = CHUNK, want_entropy: bool = False
) -> TokenStatistics:
    """Log-probs of `labels` [...] under `logits` [..., V], and the entropies; both carry gradients to the logits."""
    _check(logits, labels, "logits", temperature, chunk)
    rows = logits.reshape(-1, logits.shape[-1])
    log_probs, entropy = _FromLogits.apply(rows, labels.reshape(-1), temperature, chunk, want_entropy)
    return TokenStatistics(log_probs.view(labels.shape), entropy.view(labels.shape) if want_entropy else None)


def token_logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0, chunk: int = CHUNK) -> Tensor:
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
    out = torch.empty(len(rows), dtype=_arithmetic(logits), device=logits.device)
    for at in _cached_chunks(rows, chunk):
        out[at] = _scaled(rows[at], temperature).softmax(-1).square_().sum(-1)
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
    """`token_statistics` of the logits `hidden @ weight.T + bias`, which are never held for more than one chunk of rows.

    `hidden` [..., H], `weight` [V, H], `bias` [V], `labels` [...]. The product is taken of numbers in the dtype of `hidden`, as
    the model's own head would; everything after it in float32. Gradients flow to hidden, weight and bias where they want one.
    """
    _check(hidden, labels, "hidden", temperature, chunk)
    if weight.dim() != 2 or weight.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; with hidden {tuple(hidden.shape)} it must be [V, {hidden.shape[-1]}]."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)} but weight has shape {tuple(weight.shape)}; it must be [V].")
    rows = hidden.reshape(-1, hidden.shape[-1])
    head = weight.to(hidden.dtype)
    offset = None if bias is None else bias.to(hidden.dtype)
    log_probs, entropy = _FromHidden.apply(rows, head, offset, labels.reshape(-1), temperature, chunk, want_entropy)
    return TokenStatistics(log_probs.view(labels.shape), entropy.view(labels.shape) if want_entropy else None)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float, chunk: int, want_entropy: bool) -> Any:
        numbers = _Rows(logits, want_entropy)
        for at in _cached_chunks(logits, chunk):
            numbers.fill(at, _scaled(logits[at], temperature), labels[at])
        ctx.save_for_backward(logits, labels, numbers.normaliser, numbers.entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return numbers.log_probs, numbers.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        logits, labels, normaliser, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for at in _cached_chunks(logits, ctx.chunk):
            z = _scaled(logits[at], ctx.temperature)
            slope = _slope(z, labels[at], normaliser[at], _at(entropy, at), _at(grad_log_probs, at), _at(grad_entropy, at))
            grad[at] = slope if ctx.temperature == 1.0 else slope.div_(ctx.temperature)
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
        numbers = _Rows(hidden, want_entropy)
        logits, kernels = None, _kernels(hidden)
        for at in _chunks(len(hidden), chunk):
            del logits  # or two chunks would exist while the next is made
            logits = head_logits(hidden[at], weight, bias)
            if kernels is not None:
                numbers.take(at, kernels.statistics(logits, labels[at], temperature=temperature, want_entropy=want_entropy))
                continue
            for part, row in _parts(logits, at):
                numbers.fill(row, _scaled(logits[part], temperature), labels[row])
        # No more than a chunk in all: kept, so that the backward pass need not compute it again.
        ctx.logits = logits if len(hidden) <= chunk else None
        ctx.save_for_backward(hidden, weight, bias, labels, numbers.normaliser, numbers.entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return numbers.log_probs, numbers.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        exact = _arithmetic(hidden)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=exact) if wants_bias else None
        kernels = _kernels(hidden)
        for at in _chunks(len(hidden), ctx.chunk):
            logits = head_logits(hidden[at], weight, bias) if ctx.logits is None else ctx.logits
            numbers: list[Any] = [
                None if n is None else n[at] for n in (labels, normaliser, entropy, grad_log_probs, grad_entropy)
            ]
            if kernels is not None and grad_bias is None:
                narrow = kernels.slopes(logits, *numbers, temperature=ctx.temperature, dtype=hidden.dtype)
            else:
                narrow = _slopes(logits, numbers, ctx.temperature, hidden.dtype, grad_bias)
            del logits
            if grad_hidden is not None:
                grad_hidden[at] = narrow @ weight
            if wants_weight:
                grad_weight = _add_product(grad_weight, narrow.T, hidden[at], exact)
            del narrow
        if wants_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, _cast(grad_weight, weight), _cast(grad_bias, bias), None, None, None, None


class _Rows:
    """One number of each kind per row, filled chunk by chunk."""

    def __init__(self, like: Tensor, want_entropy: bool):
        def fresh() -> Tensor:
            return torch.empty(len(like), dtype=_arithmetic(like), device=like.device)

        self.log_probs = fresh()
        self.entropy = fresh() if want_entropy else None
        # The largest z and the logarithm of Σ exp(z - largest): two numbers, for their sum would round small entropies away.
        self.normaliser = torch.stack([fresh(), fresh()], dim=-1)

    def take(self, at: slice, found: tuple[Tensor, Tensor, Tensor | None]) -> None:
        self.log_probs[at], self.normaliser[at] = found[:2]
        if self.entropy is not None and found[2] is not None:
            self.entropy[at] = found[2]

    def fill(self, at: slice, z: Tensor, labels: Tensor) -> None:
        """With s = z - max z and S = Σ exp(s): log π(a) = s_a - log S and H = log S - Σ s exp(s) / S, both terms positive."""
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


def _slope(
    z: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """The derivative with respect to z of one chunk, given those with respect to its log-probs and entropies."""
    if grad_log_probs is not None:
        grad_log_probs = grad_log_probs.masked_fill(labels < 0, 0.0)[:, None]
    if grad_entropy is not None and entropy is not None:
        log_p = (z - normaliser[:, :1]).sub_(normaliser[:, 1:]).clamp_(min=FLOOR)
        p = log_p.exp()
        slope = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        slope = (slope if grad_log_probs is None else slope.sub_(grad_log_probs)).mul_(p)
    elif grad_log_probs is not None:
        slope = (z - normaliser[:, :1]).sub_(normaliser[:, 1:]).exp_().mul_(-grad_log_probs)
    else:
        slope = torch.zeros_like(z)
    if grad_log_probs is not None:
        slope.scatter_add_(-1, labels.clamp(min=0)[:, None], grad_log_probs)
    return slope


def _slopes(logits: Tensor, numbers: list[Any], temperature: float, dtype: torch.dtype, grad_bias: Tensor | None) -> Tensor:
    """The derivative with respect to the logits of one chunk, in `dtype`; that of the bias is added to `grad_bias`."""
    narrow = torch.empty_like(logits, dtype=dtype)
    for part in _cached_chunks(logits, len(logits)):
        rows: list[Any] = [None if n is None else n[part] for n in numbers]
        slope = _slope(_scaled(logits[part], temperature), *rows).div_(temperature)
        if grad_bias is not None:
            grad_bias += slope.sum(0)
        narrow[part] = slope
    return narrow


def _kernels(hidden: Tensor) -> ModuleType | None:
    """The kernels of row_kernels.py, where they run and agree with this file."""
    return _tried(hidden.device) if hidden.is_cuda and hidden.dtype != torch.float64 else None


@cache
def _tried(device: torch.device) -> ModuleType | None:
    try:
        kernels = require("strop.algorithms.row_kernels", extra="gpu", why="The fast output head on a GPU")
        if kernels_agree(kernels, device):
            return kernels
        reason = "they do not give the numbers of plain torch on this device"
    except MissingExtra as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a compiler may refuse in many ways; plain torch always works
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    warnings.warn(f"The kernels of the output head are off, which makes updates slower: {reason}.", stacklevel=3)
    return None


@torch.no_grad()
def kernels_agree(kernels: ModuleType, device: torch.device) -> bool:
    """Whether the kernels give what this file computes, on some rows with everything that can occur in them."""
    draw = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, 9001, generator=draw)).to(device)
    logits[1, 7] = float("-inf")
    labels = torch.tensor([0, 9000, -100, 4095, 4096, 3], device=device)
    up, up_entropy = (torch.randn(6, generator=draw).to(device) for _ in range(2))
    numbers, z = _Rows(logits, True), logits / 0.7
    numbers.fill(slice(0, 6), z, labels)
    expected = [numbers.log_probs, numbers.normaliser, numbers.entropy]
    expected.append(_slope(z, labels, numbers.normaliser, numbers.entropy, up, up_entropy).div_(0.7))
    found = list(kernels.statistics(logits, labels, temperature=0.7, want_entropy=True))
    found.append(kernels.slopes(logits, labels, *found[1:], up, up_entropy, temperature=0.7, dtype=torch.float32))
    return all(torch.allclose(a, b, rtol=2e-5, atol=2e-5) for a, b in zip(expected, found, strict=True) if a is not None)


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden @ weight.T + bias for rows [n, H], without gradient.

    On a GPU, products of 16-bit numbers are handed out in the float32 they are summed in: bf16 has steps of 1/8 at the usual
    size of a logit, which alone would move a log-prob by 0.02.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
            logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            return logits if bias is None else logits.add_(bias)
        return torch.nn.functional.linear(hidden, weight, bias)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b, summed over many chunks, so in `dtype` and not in that of the factors. 16-bit numbers on a GPU are added
    by the product itself, which sums in float32 anyway."""
    wide = a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32) if wide else (a @ b).to(dtype)
    if wide:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b
    return total


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    z = logits.to(_arithmetic(logits))
    return z if temperature == 1.0 else z / temperature


def _arithmetic(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _at(tensor: Tensor | None, at: slice) -> Tensor | None:
    return None if tensor is None else tensor[at]


def _cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or like is None else gradient.to(like.dtype)


def _cached_chunks(logits: Tensor, size: int) -> list[slice]:
    """At most `size` rows; on a CPU also no more than stay in its cache while several operations pass over them."""
    rows = max(CACHED // max(logits.shape[-1], 1), 1) if logits.device.type == "cpu" else size
    return _chunks(len(logits), min(size, rows))


def _parts(logits: Tensor, at: slice) -> Iterator[tuple[slice, slice]]:
    """The rows of one chunk in stretches that stay in the cache: where they stand in it, and where in the whole."""
    for part in _cached_chunks(logits, len(logits)):
        yield part, slice(at.start + part.start, at.start + part.stop)


def _chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _check(features: Tensor, labels: Tensor, name: str, temperature: float, chunk: int) -> None:
    if features.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} but {name} has shape {tuple(features.shape)}; labels must have the shape "
            f"{tuple(features.shape[:-1])}, one token per row."
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    if chunk < 1:
        raise ValueError(f"chunk is a number of rows and must be at least 1, got {chunk}.")
