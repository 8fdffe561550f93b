"""What all advantage estimators share: `estimate`, which calls one by name, checked inputs, statistics of
groups, discounted sums and normalisation.

An estimator is a pure function `estimator(rewards [B, T], mask [B, T], *, ...) -> AdvantageResult`. Results
are float32 (or the dtype of the rewards if wider) and exactly 0 outside the mask. The mask may have holes:
tokens that the policy did not generate, such as tool output. Discounts skip them, credit crosses them, and a
reward on one counts for the last valid token before it. `compat` names a framework whose numbers to reproduce
where the default differs. Inputs are detached here, so no gradient flows through an estimator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from strop.algorithms.aggregation import EPS, as_weights
from strop.catalog import ADVANTAGES
from strop.compat import Compat, conventions

__all__ = ["AdvantageResult", "estimate"]

Estimator = Callable[..., Tensor | tuple[Tensor, Tensor]]


class AdvantageResult(NamedTuple):
    """Both [B, T]. `advantages` weigh the policy loss, `returns` are the targets of a critic."""

    advantages: Tensor
    returns: Tensor


def estimate(
    estimator: str | Estimator, *, hyperparameters: Mapping[str, object] | None = None, **available: object
) -> AdvantageResult:
    """Call an estimator, given as function or by name, with those of the `available` arguments that its
    signature names, and with all `hyperparameters`, which replace available arguments of the same name.

    An available argument that is None counts as missing. A plugin may return one tensor, or a pair.
    """
    function = ADVANTAGES.get(estimator) if isinstance(estimator, str) else estimator
    parameters = inspect.signature(function).parameters.values()
    given = {key: value for key, value in available.items() if value is not None}
    given.update(hyperparameters or {})
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing:
        raise ValueError(
            f"The advantage estimator {getattr(function, '__name__', function)!r} needs "
            f"{', '.join(missing)}, but only {', '.join(sorted(given))} are available."
        )
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        given = {p.name: given[p.name] for p in named if p.name in given}
    result = function(**given)
    if isinstance(result, Tensor):
        return AdvantageResult(result, result)
    return AdvantageResult(*result)


# --- checked inputs -----------------------------------------------------------------------------------------


def checked_rewards(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards in float32 or wider, finite everywhere, and the mask as bool.

    A reward that is not finite is refused where the mask is set and read as 0 elsewhere.
    """
    return checked_scores(rewards, mask)[:2]


def checked_scores(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`checked_rewards`, and the score of each row: the sum of its rewards, in float64."""
    if rewards.dim() != 2 or rewards.shape != mask.shape:
        shapes = f"rewards {tuple(rewards.shape)} and mask {tuple(mask.shape)}"
        message = f"{shapes} must have one shape [batch, tokens]."
        if rewards.dim() == 1:
            message += " Put the score of each row on its last trained token first."
        raise ValueError(message)
    mask = mask.bool()
    wide = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    sums = wide.sum(dim=-1)
    # A NaN or an infinity anywhere in a row makes its sum non-finite.
    if not torch.isfinite(sums).all():
        wide = _finite("rewards", wide, mask)
        sums = wide.sum(dim=-1)
    return wide, mask, sums.double()


def checked_like(name: str, tensor: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """A tensor with the shape of the rewards, in their dtype and finite everywhere."""
    if tensor.shape != rewards.shape:
        raise ValueError(
            f"{name} {tuple(tensor.shape)} must have the shape of rewards {tuple(rewards.shape)}."
        )
    return _finite(name, tensor.to(rewards.dtype), mask)


def _finite(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
    tensor = tensor.detach()
    # A cheap test: a NaN or an infinity anywhere makes the sum non-finite.
    if torch.isfinite(tensor.sum()):
        return tensor
    strange = ~torch.isfinite(tensor)
    refused = (strange & mask).nonzero()
    if len(refused):
        row, column = refused[0].tolist()
        raise ValueError(
            f"{name} {tuple(tensor.shape)} hold {len(refused)} values under the mask {tuple(mask.shape)} "
            f"that are NaN or infinite, the first at row {row}, token {column}. Mask such a sample, or "
            "repair what computed it."
        )
    return tensor.masked_fill(strange, 0.0)


def checked_rows(name: str, tensor: Tensor, rewards: Tensor) -> Tensor:
    """One finite entry per row of the rewards."""
    if tensor.dim() != 1 or len(tensor) != len(rewards):
        raise ValueError(
            f"{name} {tuple(tensor.shape)} must hold one entry per row of rewards {tuple(rewards.shape)}: "
            f"({len(rewards)},)."
        )
    return checked_finite(name, tensor)


def checked_finite(name: str, tensor: Tensor) -> Tensor:
    """A detached tensor with one number or more per row, none of them NaN or infinite."""
    strange = (~torch.isfinite(tensor)).nonzero()
    if len(strange):
        raise ValueError(
            f"{name} {tuple(tensor.shape)} hold {len(strange)} values that are NaN or infinite, the first in "
            f"row {int(strange[0][0])}. Mask such a sample, or repair what computed it."
        )
    return tensor.detach()


def checked_groups(groups: Tensor | Sequence[object] | np.ndarray, rewards: Tensor) -> Tensor:
    """Group labels, or prompt uids of any kind, as ids 0, 1, 2 ... without gaps."""
    if not isinstance(groups, Tensor):
        groups = group_ids(groups)
    checked_rows("groups", groups, rewards)
    if groups.is_complex():
        raise ValueError(f"groups must be labels that can be sorted, got {groups.dtype}.")
    return torch.unique(groups.to(rewards.device), return_inverse=True)[1]


# --- groups: samples of one prompt --------------------------------------------------------------------------
# Every function is a scatter over the batch; none loops over samples.


class GroupStatistics(NamedTuple):
    """Per group, indexed by group id. An id that no sample has counts 0."""

    mean: Tensor
    std: Tensor
    size: Tensor


def group_ids(uids: Sequence[object] | np.ndarray | Tensor, *, compact: bool = True) -> Tensor:
    """Group ids [B] from prompt uids of any kind: equal uid, equal id; ids follow the sorted order of the
    uids.

    With `compact=False` integer uids, also written as floats, are taken as the ids they are, gaps included.
    """
    if isinstance(uids, Tensor):
        uids = uids.detach().cpu().numpy()
    labels = np.asarray(uids)
    if labels.ndim != 1:
        raise ValueError(f"uids must be one label per sample, shape (batch,), got shape {labels.shape}.")
    if labels.dtype == object:
        if all(isinstance(label, int) for label in labels):
            labels = np.asarray(labels.tolist())
        else:
            labels = labels.astype(str)
    if not compact and np.issubdtype(labels.dtype, np.floating) and np.allclose(labels, np.rint(labels)):
        labels = np.rint(labels).astype(np.int64)
    if not compact and np.issubdtype(labels.dtype, np.integer):
        return torch.as_tensor(labels.astype(np.int64))
    return torch.from_numpy(np.unique(labels, return_inverse=True)[1].astype(np.int64))


def group_sum(values: Tensor, groups: Tensor, count: int | None = None) -> Tensor:
    """Sum per group of [B] or [B, ...]."""
    if count is None:
        count = _group_count(groups)
    return values.new_zeros((count, *values.shape[1:])).index_add_(0, groups, values)


def group_size(groups: Tensor) -> Tensor:
    """Samples per group."""
    return torch.bincount(groups)


def group_mean(scores: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """(Weighted) mean per group. Weights that add up to 0 give 0."""
    if weights is None:
        return group_sum(scores, groups) / group_size(groups).clamp(min=1)
    total = group_sum(weights, groups)
    return group_sum(scores * weights, groups) / total.where(total != 0, 1.0)


def group_max(scores: Tensor, groups: Tensor) -> Tensor:
    """Largest score per group; -inf for an id that no sample has."""
    return scores.new_full((_group_count(groups),), -torch.inf).scatter_reduce(0, groups, scores, "amax")


def group_second(scores: Tensor, groups: Tensor) -> Tensor:
    """Second largest score per group, equal to the largest if two share it; -inf in a group of one."""
    best = group_max(scores, groups)
    is_best = scores == best[groups]
    tied = group_sum(is_best.long(), groups) > 1
    return torch.where(tied, best, group_max(scores.masked_fill(is_best, -torch.inf), groups))


def group_is_constant(scores: Tensor, groups: Tensor) -> Tensor:
    """Per group: every sample has exactly the same score."""
    return group_max(scores, groups) == -group_max(-scores, groups)


def group_variance(scores: Tensor, groups: Tensor) -> Tensor:
    """Unbiased variance per group (divisor n - 1); 0 for a group of one and for exactly equal scores."""
    centred = (scores - group_mean(scores, groups)[groups]).masked_fill(
        group_is_constant(scores, groups)[groups], 0.0
    )
    return group_sum(centred.square(), groups) / (group_size(groups) - 1).clamp(min=1)


def group_statistics(scores: Tensor, groups: Tensor, *, variance_floor: float = 0.0) -> GroupStatistics:
    """Mean, std = sqrt(max(var, floor)) with the n - 1 variance, and size, in the dtype of the scores.

    A group of one has mean 0 and std 1, so that its score does not change.
    """
    size = group_size(groups)
    mean = group_mean(scores, groups).masked_fill(size < 2, 0.0)
    std = group_variance(scores, groups).clamp(min=variance_floor).sqrt().masked_fill(size < 2, 1.0)
    return GroupStatistics(mean, std, size)


def _group_count(groups: Tensor) -> int:
    if not len(groups):
        return 0
    return int(groups.max()) + 1


# --- discounted sums, by blocks instead of by token, and over masks with holes ------------------------------

BLOCK = 16
CACHED = 1 << 21  # numbers that stay in a CPU's last-level cache over several operations


def row_chunks(tensor: Tensor) -> Iterator[slice]:
    """Slices of rows: on a CPU small enough for the cache, elsewhere all rows at once."""
    rows = max(len(tensor), 1)
    if len(tensor) and tensor.device.type == "cpu":
        rows = max(CACHED // max(tensor[0].numel(), 1), 1)
    return (slice(start, start + rows) for start in range(0, len(tensor), rows))


def discounted_sums(terms: Tensor, decay: float, block: int = BLOCK) -> Tensor:
    """y_t = x_t + decay * y_{t+1} along the last dimension of [B, T], exactly.

    Inside a block of K columns the recursion is one product with the K x K triangle of powers of `decay`. The
    first columns of the blocks obey the same recursion with decay^K, and y is the sum inside the block plus
    decay^(K - i) times the first column of the next one. No [B, T, T] tensor is made.
    """
    batch, length = terms.shape
    if decay == 1.0:
        return terms.flip(-1).cumsum_(-1).flip(-1)
    if length <= block:
        return terms @ _triangle(length, decay, terms)
    count = -(-length // block)
    even = terms.contiguous()
    if length != count * block:
        even = pad(terms, (0, count * block - length))
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
    """For each position the number of valid tokens before it: its own rank if valid, else the rank of the
    next valid one."""
    ranks = torch.zeros(weights.shape, dtype=torch.int64, device=weights.device)
    if weights.shape[-1] > 1:
        torch.cumsum(weights[:, :-1], dim=-1, dtype=torch.int64, out=ranks[:, 1:])
    return ranks


def close_holes(values: Tensor, ranks: Tensor) -> Tensor:
    """Valid tokens of each row moved to the left, in order, with zeros behind them.

    `values` must be 0 outside the mask: other values there are added to the next valid token.
    """
    return torch.zeros_like(values).scatter_add_(-1, ranks, values)


def reopen_holes(closed: Tensor, ranks: Tensor) -> Tensor:
    """Inverse of `close_holes`; a hole gets the value of the next valid token, 0 where there is none."""
    return closed.gather(-1, ranks)


# --- normalisation over all valid tokens of the batch -------------------------------------------------------

Normalisation = Literal["whiten", "population", "centre", "none"]


def normalise(advantages: Tensor, mask: Tensor, how: Normalisation, *, compat: Compat = None) -> Tensor:
    """Normalise over the tokens of `mask` (bool), whole batch at once.

    - "whiten": (A - mean) / sqrt(var + 1e-8), var with divisor n - 1; "population" with `compat="openrlhf"`
    - "population": (A - mean) / sqrt(max(var, 1e-8)), var with divisor n
    - "centre": A - mean
    - "none": A

    Exactly equal advantages, a single one among them, become exactly 0. Positions outside the mask must be 0
    and stay so; for "verl" and "openrlhf" they may be anything and are shifted and scaled like the others,
    and "verl" refuses to whiten fewer than two tokens.
    """
    if how not in get_args(Normalisation):
        raise ValueError(f"normalisation must be one of {', '.join(get_args(Normalisation))}, got {how!r}.")
    if how == "none":
        return advantages
    rules = conventions(compat)
    if how == "whiten" and rules.whitening == "n":
        how = "population"
    count = int(mask.count_nonzero())
    if how == "whiten" and count < 2 and rules.whitening_one_token == "error":
        raise ValueError(
            f"Whitening needs at least 2 valid tokens, the mask {tuple(mask.shape)} has {count}."
        )
    shifted, mean, squares = _centre(advantages, mask, count, keep_outside=rules.outside_mask == "kept")
    near_constant = rules.outside_mask == "zero" and _may_be_constant(
        squares / max(count, 1), mean, advantages.dtype
    )
    if near_constant and _is_constant(advantages, mask):
        return torch.zeros_like(advantages)
    if how == "whiten":
        return shifted.mul_((squares / max(count - 1, 1) + EPS) ** -0.5)
    if how == "population":
        return shifted.mul_(max(squares / max(count, 1), EPS) ** -0.5)
    return shifted


def _centre(values: Tensor, mask: Tensor, count: int, *, keep_outside: bool) -> tuple[Tensor, float, float]:
    """Values minus their mean over the mask, that mean, and the sum of squares of the result.

    Values are 0 outside the mask and stay so, unless `keep_outside`: then they may be anything there and are
    shifted too. A row is summed in the dtype of the values, rows are added in float64.
    """
    kept = values
    if keep_outside:
        kept = values * as_weights(mask, values.dtype)
    mean = float(kept.sum(dim=1).double().sum()) / max(count, 1)
    shifted = torch.empty_like(values)
    squares = 0.0
    for rows in row_chunks(values):
        centred = torch.sub(values[rows], mean, out=shifted[rows])
        weights = as_weights(mask[rows], values.dtype)
        if keep_outside:
            centred = centred * weights
        else:
            centred.mul_(weights)
        squares += float(torch.linalg.vector_norm(centred, dim=1).double().square().sum())
    return shifted, mean, squares


def _may_be_constant(variance: float, mean: float, dtype: torch.dtype) -> bool:
    """A cheap test that lets the exact one run only when the spread is within rounding of the mean."""
    return variance**0.5 <= 64 * torch.finfo(dtype).eps * abs(mean)


def _is_constant(values: Tensor, mask: Tensor) -> bool:
    kept = values[mask]
    return not len(kept) or bool(kept.min() == kept.max())
