"""Discounted sums from right to left, by blocks instead of by token, and over masks with holes."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


def discounted_sums(terms: Tensor, decay: float, *, block: int = BLOCK) -> Tensor:
    """y_t = x_t + decay * y_{t+1} along the last dimension of [B, T], exactly.

    Inside a block of K columns the recursion is one product with the K x K triangle of powers of `decay`; between blocks only
    the first column of the block to the right is carried, times decay^(K - i). Costs O(B T K) without a [B, T, T] tensor.
    """
    batch, length = terms.shape
    out = torch.empty_like(terms)
    if not batch or not length:
        return out
    exponents = torch.arange(block + 1, device=terms.device, dtype=torch.float64)
    powers = torch.pow(torch.tensor(decay, dtype=torch.float64, device=terms.device), exponents)
    lag = exponents[:block, None] - exponents[None, :block]
    triangle = torch.where(lag >= 0, powers[lag.clamp(min=0).long()], 0.0).to(terms.dtype)
    reach = powers.flip(0)[:block].to(terms.dtype)
    carry: Tensor | None = None
    for start in reversed(range(0, length, block)):
        stop = min(start + block, length)
        width = stop - start
        here = torch.mm(terms[:, start:stop], triangle[:width, :width])
        if carry is not None:
            here.addr_(carry, reach)
        out[:, start:stop] = here
        carry = here[:, 0]
    return out


def has_holes(mask: Tensor) -> bool:
    """Whether any row has a valid token after an invalid one."""
    return bool((mask[:, 1:] & ~mask[:, :-1]).any())


def rank_among_valid(mask: Tensor) -> Tensor:
    """For each position the number of valid tokens before it: its own rank if valid, else the rank of the next valid one."""
    return mask.cumsum(-1) - mask.long()


def close_holes(values: Tensor, mask: Tensor, ranks: Tensor) -> Tensor:
    """Valid tokens of each row moved to the left, in order; zeros behind them, and one extra zero column at the end."""
    width = mask.shape[-1]
    closed = values.new_zeros((*mask.shape[:-1], width + 1))
    closed.scatter_(-1, ranks.masked_fill(~mask, width), values)
    closed[..., width] = 0.0
    return closed


def reopen_holes(closed: Tensor, ranks: Tensor) -> Tensor:
    """Inverse of `close_holes`; a hole gets the value of the next valid token, 0 where there is none."""
    return closed.gather(-1, ranks)
