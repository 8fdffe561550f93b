"""Discounted sums from right to left, by blocks instead of by token, and over masks with holes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16
CACHED = 1 << 21  # numbers that stay in a processor's last cache while several operations pass over them


def row_chunks(tensor: Tensor) -> Iterator[slice]:
    """Slices of rows: on a CPU small enough for the cache, elsewhere all rows at once."""
    rows = max(CACHED // max(tensor[0].numel(), 1), 1) if len(tensor) and tensor.device.type == "cpu" else max(len(tensor), 1)
    return (slice(start, start + rows) for start in range(0, len(tensor), rows))


def discounted_sums(terms: Tensor, decay: float, block: int = BLOCK) -> Tensor:
    """y_t = x_t + decay * y_{t+1} along the last dimension of [B, T], exactly.

    Inside a block of K columns the recursion is one product with the K x K triangle of powers of `decay`. The first columns of
    the blocks obey the same recursion with decay^K, and y is the sum inside the block plus decay^(K - i) times the first
    column of the next one. No [B, T, T] tensor is made.
    """
    batch, length = terms.shape
    if decay == 1.0:
        return terms.flip(-1).cumsum_(-1).flip(-1)
    if length <= block:
        return terms @ _triangle(length, decay, terms)
    count = -(-length // block)
    even = terms.contiguous() if length == count * block else pad(terms, (0, count * block - length))
    inside = even.view(batch * count, block) @ _triangle(block, decay, terms)
    inside = inside.view(batch, count, block)
    firsts = discounted_sums(inside[:, :, 0], decay**block, block)
    reach = _powers(block, decay, terms).flip(0) * decay
    inside[:, :-1].addcmul_(firsts[:, 1:, None], reach)
    return inside.view(batch, count * block)[:, :length]


def _powers(count: int, decay: float, like: Tensor) -> Tensor:
    """1, decay, decay^2 ..."""
    exponents = torch.arange(count, dtype=torch.float64, device=like.device)
    return torch.pow(torch.tensor(decay, dtype=torch.float64, device=like.device), exponents).to(like.dtype)


def _triangle(size: int, decay: float, like: Tensor) -> Tensor:
    """M with M[j, i] = decay^(j - i) for j >= i, so that x @ M sums each column and those to its right."""
    places = torch.arange(size, device=like.device)
    lag = places[:, None] - places
    return torch.where(lag >= 0, _powers(max(size, 1), decay, like)[lag.clamp(min=0)], 0.0)


def has_holes(weights: Tensor) -> bool:
    """Whether any row of a mask of zeros and ones has a valid token after an invalid one."""
    rises = weights[:, 1:] - weights[:, :-1]
    return bool(rises.numel() and rises.amax() > 0)


def rank_among_valid(weights: Tensor) -> Tensor:
    """For each position the number of valid tokens before it: its own rank if valid, else the rank of the next valid one."""
    ranks = torch.zeros(weights.shape, dtype=torch.int64, device=weights.device)
    if weights.shape[-1] > 1:
        torch.cumsum(weights[:, :-1], dim=-1, dtype=torch.int64, out=ranks[:, 1:])
    return ranks


def close_holes(values: Tensor, ranks: Tensor) -> Tensor:
    """Valid tokens of each row moved to the left, in order, with zeros behind them.

    `values` must be 0 outside the mask: what stands there is added to the next valid token.
    """
    return torch.zeros_like(values).scatter_add_(-1, ranks, values)


def reopen_holes(closed: Tensor, ranks: Tensor) -> Tensor:
    """Inverse of `close_holes`; a hole gets the value of the next valid token, 0 where there is none."""
    return closed.gather(-1, ranks)
