"""One pass over the logits of a row, forward and backward, as Triton kernels: see logprobs.py for the
formulas.

Plain torch reads and writes a chunk of logits once for every operation; at a vocabulary of 152k that is as
much time as the matrix products of the head. Here each logit is read once forward, and read once and its
derivative written once backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FLOOR = tl.constexpr(-1e4)
_BLOCK = 4096


@triton.jit
def _statistics(
    logits, labels, log_probs, normaliser, entropies, vocabulary, stride, temperature,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * stride
    top = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(own + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(top, tl.max(z, 0))
        s = z - higher
        p = tl.exp(s)
        fade = tl.exp(top - higher)
        if ENTROPY:
            # What was summed around the old largest, moved to the new one; nothing was summed before the
            # first block.
            moved = tl.where(total > 0, (top - higher) * total, 0.0)
            weighted = (weighted + moved) * fade + tl.sum(tl.where(s > _FLOOR, s * p, 0.0), 0)
        total = total * fade + tl.sum(p, 0)
        top = higher
    log_total = tl.log(total)
    label = tl.load(labels + row)
    chosen = tl.load(own + tl.maximum(label, 0)).to(tl.float32) / temperature - top
    tl.store(log_probs + row, tl.where(label < 0, 0.0, chosen - log_total))
    tl.store(normaliser + row * 2, top)
    tl.store(normaliser + row * 2 + 1, log_total)
    if ENTROPY:
        tl.store(entropies + row, log_total - weighted / total)


def statistics(
    logits: Tensor, labels: Tensor, *, temperature: float, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs of the labels [n], (largest z, log Σ exp(z - largest)) [n, 2], and entropies [n] where
    wanted."""
    rows, vocabulary = logits.shape
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    normaliser = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    entropies = torch.empty_like(log_probs) if want_entropy else None
    _statistics[(rows,)](
        logits, labels.contiguous(), log_probs, normaliser, log_probs if entropies is None else entropies,
        vocabulary, logits.stride(0), temperature, ENTROPY=want_entropy, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return log_probs, normaliser, entropies


@triton.jit
def _slopes(
    logits, labels, normaliser, entropies, grad_log_probs, grad_entropies, out, vocabulary, stride,
    temperature, LOG_PROBS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    z = tl.load(logits + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32) / temperature
    log_p = z - tl.load(normaliser + row * 2) - tl.load(normaliser + row * 2 + 1)
    p = tl.exp(log_p)
    slope = tl.zeros([BLOCK], tl.float32)
    if ENTROPY:
        slope -= tl.load(grad_entropies + row) * (tl.maximum(log_p, _FLOOR) + tl.load(entropies + row))
    if LOG_PROBS:
        label = tl.load(labels + row)
        gradient = tl.where(label < 0, 0.0, tl.load(grad_log_probs + row))
        slope = (slope - gradient) * p + tl.where(at == label, gradient, 0.0)
    else:
        slope *= p
    tl.store(out + row * vocabulary + at, (slope / temperature).to(out.dtype.element_ty), mask=inside)


def slopes(
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    entropies: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropies: Tensor | None,
    *,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Derivatives with respect to the logits [n, V] in `dtype`, given those with respect to log-probs and
    entropies."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=dtype, device=logits.device)
    of_entropy = entropies is not None and grad_entropies is not None
    _slopes[(rows, triton.cdiv(vocabulary, _BLOCK))](
        logits, labels.contiguous(), normaliser.contiguous(),
        normaliser if entropies is None else entropies.contiguous(),
        normaliser if grad_log_probs is None else grad_log_probs.float().contiguous(),
        normaliser if grad_entropies is None else grad_entropies.float().contiguous(),
        out, vocabulary, logits.stride(0), temperature,
        LOG_PROBS=grad_log_probs is not None, ENTROPY=of_entropy, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return out
