"""What an estimator gives back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AdvantageResult(NamedTuple):
    """Both [B, T]. `advantages` weigh the policy loss, `returns` are what a critic learns to predict."""

    advantages: Tensor
    returns: Tensor
