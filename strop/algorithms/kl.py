"""Estimators of the KL divergence from the policy to its reference, and controllers of its coefficient.

With d = log pi(a) - log pi_ref(a) on sampled tokens (Schulman, "Approximating KL divergence"):

    k1 = d        unbiased, high variance, may be negative
    abs = |d|
    k2 = d^2 / 2  biased; its gradient is the unbiased gradient of the KL
    k3 = exp(-d) - 1 + d   unbiased and never negative
    full = sum_v pi_v (log pi_v - log pi_ref_v), from the logits of both models

A `+` after a name keeps the value and takes the gradient of k2 instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypedDict

import torch
from torch import Tensor

from strop.catalog import KL_ESTIMATORS
from strop.compat import Conventions

UNLIMITED = float("inf")


def k1(log_probs: Tensor, ref_log_probs: Tensor, *, limit: float = UNLIMITED) -> Tensor:
    """d, within ±`limit`."""
    gap = log_probs - ref_log_probs
    if limit != UNLIMITED:
        gap = gap.clamp(-limit, limit)
    return gap


def absolute(log_probs: Tensor, ref_log_probs: Tensor, *, limit: float = UNLIMITED) -> Tensor:
    """|d|, at most `limit`."""
    gap = (log_probs - ref_log_probs).abs()
    if limit != UNLIMITED:
        gap = gap.clamp(max=limit)
    return gap


def k2(log_probs: Tensor, ref_log_probs: Tensor, *, limit: float = UNLIMITED) -> Tensor:
    """d² / 2, at most `limit`."""
    half_square = 0.5 * (log_probs - ref_log_probs).square()
    if limit != UNLIMITED:
        half_square = half_square.clamp(max=limit)
    return half_square


def k3(
    log_probs: Tensor, ref_log_probs: Tensor, *, limit: float = 10.0, exponent_limit: float = 20.0
) -> Tensor:
    """exp(-d) - 1 + d. The exponent is clamped to ±`exponent_limit` and the result to `limit`, so that one
    outlier does not dominate the batch."""
    gap = (ref_log_probs - log_probs).clamp(-exponent_limit, exponent_limit)
    return (gap.exp() - gap - 1.0).clamp(-limit, limit)


def full(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL per position from two logit tensors [..., V]."""
    if logits.shape != ref_logits.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} and ref_logits {tuple(ref_logits.shape)} must have one shape "
            "[..., vocabulary]."
        )
    policy = logits.float().log_softmax(-1)
    reference = ref_logits.float().log_softmax(-1)
    return torch.where(policy.isneginf(), 0.0, policy.exp() * (policy - reference)).sum(-1)


def kl_penalty(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    *,
    estimator: str = "k3",
    old_log_probs: Tensor | None = None,
    ratio_limit: float = 10.0,
    **limits: float,
) -> Tensor:
    """The named estimate per token; `limits` go to the estimator (`limit`, for k3 also `exponent_limit`).

    For a name with `+`: v + s - sg(s), v the detached value and s = k2. If an older policy sampled the
    tokens, `old_log_probs` are its log-probs, and s is weighted by the detached ratio pi / pi_old, at most
    `ratio_limit`.
    """
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)} and ref_log_probs {tuple(ref_log_probs.shape)} must have "
            "one shape."
        )
    if estimator.strip().removesuffix("+") == "full":
        raise ValueError(
            f"The KL estimator {estimator!r} needs the logits of both models, not the log-probs of the "
            f"sampled tokens (got {tuple(log_probs.shape)}). Call `full(logits, ref_logits)`, or choose k1, "
            "k2 or k3."
        )
    function = KL_ESTIMATORS.get(estimator)
    value = function(log_probs, ref_log_probs, **limits)
    if not estimator.strip().endswith("+"):
        return value
    surrogate = k2(log_probs, ref_log_probs)
    if old_log_probs is not None:
        surrogate = surrogate * (log_probs - old_log_probs).detach().exp().clamp(max=ratio_limit)
    return value.detach() + (surrogate - surrogate.detach())


class KLLimits(TypedDict, total=False):
    """Limits of an estimator."""

    limit: float
    exponent_limit: float


def kl_limits(estimator: str, rules: Conventions) -> KLLimits:
    """The limits of a named estimator, where the conventions differ from its defaults."""
    limits: KLLimits = {}
    if rules.kl_limit is not None:
        limits["limit"] = rules.kl_limit
        if KL_ESTIMATORS.get(estimator) is k3:
            limits["exponent_limit"] = rules.k3_exponent_limit
    return limits


class KLController(Protocol):
    """The coefficient of the KL in the reward, step by step. Its state belongs in a checkpoint."""

    value: float

    def update(self, current_kl: float, samples: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


class FixedKL:
    """A constant coefficient."""

    def __init__(self, coef: float):
        self.value = coef

    def update(self, current_kl: float, samples: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Nothing to restore: a coefficient that was changed before a resume takes effect."""


class AdaptiveKL(FixedKL):
    """Proportional control (Ziegler et al., 2019): coef *= 1 + clip(KL / target - 1, -0.2, 0.2) * samples /
    horizon."""

    def __init__(self, coef: float, *, target: float, horizon: int):
        super().__init__(coef)
        if target <= 0 or horizon <= 0:
            raise ValueError(
                f"An adaptive KL coefficient needs target_kl > 0 and horizon > 0, got {target} and {horizon}."
            )
        self.target = target
        self.horizon = horizon
        self.start = coef

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "start": self.start}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from the saved coefficient, unless the run was resumed with another one to start from."""
        if state.get("start", self.start) == self.start:
            self.value = float(state["value"])

    def update(self, current_kl: float, samples: int) -> None:
        if 0.2 * samples >= self.horizon:  # the penalty would become a reward
            raise ValueError(
                f"kl_ctrl.horizon={self.horizon} with {samples} samples per step: one step could make the "
                f"coefficient 0 or negative. Set it to more than {0.2 * samples:g}."
            )
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * samples / self.horizon


def kl_controller(
    kind: Literal["fixed", "adaptive"], *, coef: float, target: float = 0.1, horizon: int = 10_000
) -> KLController:
    """The controller of a configuration's `kl_ctrl.type`."""
    if kind == "fixed":
        return FixedKL(coef)
    if kind == "adaptive":
        return AdaptiveKL(coef, target=target, horizon=horizon)
    raise ValueError(f"kl_ctrl.type must be 'fixed' or 'adaptive', got {kind!r}.")
