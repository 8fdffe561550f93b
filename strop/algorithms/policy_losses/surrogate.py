"""What the policy losses share: their result, their inputs made safe, and the ratio between two policies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.masked import as_weights, masked_fill_zero
from strop.algorithms.shapes import require_same_shape

LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any clip range and far below overflow
LEVELS = ("token", "sequence", "sequence_token")


class PolicyLoss(NamedTuple):
    per_token: Tensor  # [B, T], zero outside the mask
    metrics: dict[str, Tensor]  # [B, T] each, without gradient, to be averaged over the mask


def inside(mask: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    """The given tensors with zeros outside the mask, so that whatever stood there reaches no value and no gradient."""
    require_same_shape(mask=mask, **tensors)
    weights: dict[torch.dtype, Tensor] = {}
    for tensor in tensors.values():
        if tensor.dtype not in weights:
            weights[tensor.dtype] = as_weights(mask, tensor.dtype)
    return tuple(masked_fill_zero(tensor, mask, weights[tensor.dtype]) for tensor in tensors.values())


def safe_factor(tensor: Tensor, mask: Tensor) -> Tensor:
    """For a product with something that is 0 outside the mask: the tensor itself if it is finite, else zeros outside too."""
    require_same_shape(mask=mask, factor=tensor)
    finite = tensor.device.type == "cpu" and bool(torch.isfinite(tensor.detach().sum()))
    return tensor if finite else masked_fill_zero(tensor, mask)


def finish(per_token: Tensor, mask: Tensor, rollout_weights: Tensor | None, **metrics: Tensor) -> PolicyLoss:
    """Apply the importance weights of the rollout, which are constants, and cut the metrics off the graph."""
    if rollout_weights is not None:
        (weights,) = inside(mask, rollout_weights=rollout_weights.detach())
        per_token = per_token * weights
    return PolicyLoss(per_token, {name: _as_numbers(value.detach(), per_token.dtype) for name, value in metrics.items()})


def nowhere(like: Tensor) -> Tensor:
    """The metric of an event that this loss does not know: zeros of that shape, without their memory."""
    return like.new_zeros(()).expand_as(like)


def _as_numbers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Booleans go through bytes, a conversion that is many times faster on a CPU."""
    return (values.view(torch.uint8) if values.dtype == torch.bool else values).to(dtype)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's mask as [B, 1]; 0 for a row without tokens. `values` are already zero outside the mask."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def log_ratio(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, level: str = "token", limit: float | None = LOG_RATIO_LIMIT
) -> Tensor:
    """x = log π(a) - log π_old(a), zero outside the mask, limited to ±`limit`, at one of three levels:

    token            each token its own
    sequence         the mean of the row, value and gradient (GSPO): exp of it is the geometric mean of the ratios
    sequence_token   the value of the row mean, the gradient of the token alone (GSPO-token)
    """
    require_same_shape(mask=mask, log_probs=log_probs, old_log_probs=old_log_probs)
    x = at_level(masked_fill_zero(log_probs - old_log_probs, mask), mask, level)
    return x if limit is None else x.clamp(-limit, limit)


def at_level(x: Tensor, mask: Tensor, level: str) -> Tensor:
    """Log-ratios of tokens, zero outside the mask, at one of the levels of `log_ratio`."""
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}.")
    if level == "token":
        return x
    mean = row_mean(x, mask)
    return mean.expand_as(x) if level == "sequence" else x - x.detach() + mean.detach()


def require_clip_range(clip_low: float, clip_high: float) -> None:
    if clip_low < 0 or clip_high < 0:
        raise ValueError(
            f"clip_low and clip_high are distances from a ratio of 1 and must not be negative: {clip_low}, {clip_high}."
        )


def sign_choice(advantages: Tensor, positive: float, otherwise: float) -> Tensor:
    """`positive` where the advantage is above zero, else `otherwise`."""
    up = as_weights(advantages > 0, advantages.dtype)
    return positive * up + otherwise * (1 - up)
