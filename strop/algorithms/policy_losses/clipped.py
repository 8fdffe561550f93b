"""What all policy losses share (`policy_loss`, safe inputs, the ratio between two policies), and PPO's
clipped loss with its variants.

A policy loss is one published objective, per token, not reduced:

    loss(log_probs, old_log_probs, advantages, mask, *, <settings>) -> PolicyLoss(per_token, metrics)

All tensors are [B, T]; the mask is set on trained tokens. Nothing is averaged inside, neither the loss nor a
metric: the caller reduces them with the totals of the whole optimizer step (`aggregation.py`), so that
micro-batches cannot change the result. If a formula is only defined for one reduction, its entry in
`catalog.POLICY_LOSSES` says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.aggregation import as_weights, masked_fill_zero, require_same_shape
from strop.catalog import POLICY_LOSSES

LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any clip range and far below overflow
LEVELS = ("token", "sequence", "sequence_token")


class PolicyLoss(NamedTuple):
    """The result of a policy loss."""

    per_token: Tensor  # [B, T], zero outside the mask
    metrics: dict[str, Tensor]  # [B, T] each, without gradient, to be averaged over the mask


def policy_loss(loss: str | Callable[..., PolicyLoss], **available: object) -> PolicyLoss:
    """Call a loss, or the one with this name, with those of the `available` arguments that its signature
    names.

    >>> import torch
    >>> one = torch.ones(1, 2)
    >>> inputs = {"log_probs": -one, "old_log_probs": -one, "advantages": one, "mask": one}
    >>> policy_loss("gpg", **inputs, clip_low=0.2).per_token
    tensor([[1., 1.]])
    """
    function = POLICY_LOSSES.get(loss) if isinstance(loss, str) else loss
    parameters = inspect.signature(function).parameters
    named = {key: p for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    chosen = available
    if len(named) == len(parameters):
        chosen = {key: available[key] for key in parameters if key in available}
    missing = [key for key, p in named.items() if p.default is p.empty and key not in chosen]
    if missing:
        raise ValueError(
            f"The policy loss {getattr(function, '__name__', function)!r} needs {', '.join(missing)}; given "
            f"were {', '.join(sorted(available))}."
        )
    result: PolicyLoss = function(**chosen)
    return result


# --- shared parts of the formulas ---------------------------------------------------------------------------


def inside(mask: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    """The given tensors with zeros outside the mask, so that no value and no gradient depends on what was
    there."""
    require_same_shape(mask=mask, **tensors)
    weights: dict[torch.dtype, Tensor] = {}
    for tensor in tensors.values():
        if tensor.dtype not in weights:
            weights[tensor.dtype] = as_weights(mask, tensor.dtype)
    return tuple(masked_fill_zero(tensor, mask, weights[tensor.dtype]) for tensor in tensors.values())


def safe_factor(tensor: Tensor, mask: Tensor) -> Tensor:
    """A factor of a product whose other factor is 0 outside the mask: the tensor itself if it is finite, else
    with zeros outside the mask."""
    require_same_shape(mask=mask, factor=tensor)
    if tensor.device.type == "cpu" and bool(torch.isfinite(tensor.detach().sum())):
        return tensor
    return masked_fill_zero(tensor, mask)


def finish(per_token: Tensor, mask: Tensor, rollout_weights: Tensor | None, **metrics: Tensor) -> PolicyLoss:
    """Apply the importance weights of the rollout, which are constants, and detach the metrics."""
    if rollout_weights is not None:
        (weights,) = inside(mask, rollout_weights=rollout_weights.detach())
        per_token = per_token * weights
    detached = {name: _as_numbers(value.detach(), per_token.dtype) for name, value in metrics.items()}
    return PolicyLoss(per_token, detached)


def log_of_weights(rollout_weights: Tensor, mask: Tensor, *, least: float) -> Tensor:
    """Logarithms of importance weights of at least `least`, in float32 or wider: in float16 `least` may be 0,
    and so are the weights of tokens outside the mask."""
    wide = rollout_weights.to(torch.promote_types(rollout_weights.dtype, torch.float32))
    (weights,) = inside(mask, rollout_weights=wide)
    return weights.clamp(min=least).log()


def nowhere(like: Tensor) -> Tensor:
    """The metric of an event that cannot happen in a loss: zeros in the shape of `like`, without memory."""
    return like.new_zeros(()).expand_as(like)


def _as_numbers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Booleans are converted by way of bytes, which is many times faster on a CPU."""
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    return values.to(dtype)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's mask as [B, 1]; 0 for a row without tokens. `values` are already zero outside the
    mask."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def log_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    limit: float | None = LOG_RATIO_LIMIT,
) -> Tensor:
    """x = log π(a) - log π_old(a), zero outside the mask, limited to ±`limit`, at one of three levels:

    - "token": the value of each token
    - "sequence": the mean of the row, value and gradient (GSPO); its exp is the geometric mean of the ratios
    - "sequence_token": the value of the row mean, the gradient of the token alone (GSPO-token)
    """
    require_same_shape(mask=mask, log_probs=log_probs, old_log_probs=old_log_probs)
    x = at_level(masked_fill_zero(log_probs - old_log_probs, mask), mask, level)
    if limit is not None:
        x = x.clamp(-limit, limit)
    return x


def at_level(x: Tensor, mask: Tensor, level: str) -> Tensor:
    """Log-ratios of tokens, zero outside the mask, at one of the levels of `log_ratio`."""
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}.")
    if level == "token":
        return x
    mean = row_mean(x, mask)
    if level == "sequence":
        return mean.expand_as(x)
    return x - x.detach() + mean.detach()


def require_clip_range(clip_low: float, clip_high: float) -> None:
    """Refuse a clip range that does not contain a ratio of 1."""
    if clip_low < 0 or clip_high < 0:
        raise ValueError(
            f"clip_low and clip_high are distances from a ratio of 1 and must not be negative: {clip_low}, "
            f"{clip_high}."
        )


def sign_choice(advantages: Tensor, positive: float, otherwise: float) -> Tensor:
    """`positive` where the advantage is above zero, else `otherwise`."""
    up = as_weights(advantages > 0, advantages.dtype)
    return positive * up + otherwise * (1 - up)


# --- PPO's clipped loss, and losses that bound a divergence instead of the ratio ----------------------------


def vanilla(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    ratio_cap: float | None = None,
    level: str = "token",
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """PPO-clip (Schulman et al. 2017) with separate sides (DAPO) and dual clip (Ye et al. 2020).

    l = max(-A r, -A clip(r, 1 - low, 1 + high)), and l = min(l, -A c) where A < 0 and `clip_c` is given.
    `ratio_cap` bounds r in the unclipped term for both signs of A (two-sided clipping); `level` is that of
    `log_ratio`.
    """
    require_clip_range(clip_low, clip_high)
    if clip_c is not None and not clip_c > 1:
        raise ValueError(
            f"clip_c (dual clip) bounds the ratio of bad tokens and must be greater than 1, got {clip_c}."
        )
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask, level=level)
    ratio = x.exp()
    gain = -advantages
    clipped = gain * ratio.clamp(1 - clip_low, 1 + clip_high)
    if ratio_cap is None:
        plain = gain * ratio
        beyond = clipped > plain
    else:
        capped = ratio.clamp(max=ratio_cap)
        plain = gain * capped
        beyond = gain * capped.clamp(1 - clip_low, 1 + clip_high) > plain
    loss = torch.maximum(plain, clipped)
    bounded = nowhere(beyond)
    if clip_c is not None:
        # |A| c is -A c for tokens with A < 0. It never bounds tokens with A > 0, whose loss is not positive.
        bound = advantages.abs() * clip_c
        bounded = loss > bound
        loss = torch.minimum(loss, bound)
    return finish(
        loss, mask, rollout_weights, pg_clipfrac=beyond, ppo_kl=-x.detach(), pg_clipfrac_lower=bounded
    )


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 20.0,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """DPPO with the total variation of the sampled token, |π(a) - π_old(a)|, as trust region; see
    `_divergence_bounded`."""
    require_same_shape(mask=mask, log_probs=log_probs, old_log_probs=old_log_probs)
    moved = (log_probs.detach().exp() - old_log_probs.exp()).abs()
    return _divergence_bounded(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        moved,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_c=clip_c,
        rollout_weights=rollout_weights,
    )


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 20.0,
    rollout_weights: Tensor | None = None,
) -> PolicyLoss:
    """DPPO with the binary KL divergence of the sampled token against all others as trust region:
    KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)); see `_divergence_bounded`.
    """
    require_same_shape(mask=mask, log_probs=log_probs, old_log_probs=old_log_probs)
    moved = binary_kl(old_log_probs, log_probs.detach())
    return _divergence_bounded(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        moved,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_c=clip_c,
        rollout_weights=rollout_weights,
    )


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of two coins that show the sampled token with probabilities p and q."""
    p = log_p.exp()
    q = log_q.exp()
    rest_p = (1 - p).clamp(min=1e-8)
    rest_q = (1 - q).clamp(min=1e-8)
    return p * (log_p - log_q) + rest_p * (rest_p / rest_q).log()


def _divergence_bounded(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    moved: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    rollout_weights: Tensor | None,
) -> PolicyLoss:
    """l = -A sg(min(r, c)) log π for tokens inside the trust region, 0 for those that left it in the
    direction A pushes them.

    A token has left when A > 0, its probability rose and it moved by more than `clip_high`, or A <= 0, its
    probability fell and it moved by more than `clip_low`. `clip_c` truncates the ratio.
    """
    require_clip_range(clip_low, clip_high)
    (advantages,) = inside(mask, advantages=advantages)
    x = log_ratio(log_probs, old_log_probs, mask)
    rose_too_far = (advantages > 0) & (x > 0) & (moved > clip_high)
    fell_too_far = (advantages <= 0) & (x < 0) & (moved > clip_low)
    left = (rose_too_far | fell_too_far).detach()
    ratio = x.detach().exp()
    loss = (-advantages * ratio.clamp(max=clip_c)).masked_fill(left, 0.0) * safe_factor(log_probs, mask)
    truncated = (ratio > clip_c) & ~left
    return finish(
        loss, mask, rollout_weights, pg_clipfrac=left, ppo_kl=-x.detach(), pg_clipfrac_lower=truncated
    )
