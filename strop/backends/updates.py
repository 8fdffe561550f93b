"""Around one optimizer update: hyperparameters other than those of the configuration, and loss scaling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch.optim import Optimizer


@dataclass(frozen=True)
class StepSettings:
    """Hyperparameters of one update. None: those of the configuration and the schedule."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    """Biases and norms (one dimension) get none in any case."""
    grad_clip: float | None = None
    """0: gradients are not clipped."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "grad_clip"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value} must not be negative.")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must lie in [0, 1).")


@contextlib.contextmanager
def overridden(optimizer: Optimizer, settings: StepSettings) -> Iterator[None]:
    """The optimizer has the hyperparameters of `settings` inside the block."""
    named = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    changes = {name: value for name, value in named.items() if value is not None}
    for name in changes:
        if name not in optimizer.defaults:
            raise ValueError(
                f"{type(optimizer).__name__} has no {name}. It has {sorted(optimizer.defaults)}."
            )
    before = []
    for group in optimizer.param_groups:
        own = dict(changes)
        if settings.weight_decay is not None and _decays(group["params"]):
            own["weight_decay"] = settings.weight_decay
        before.append({name: group[name] for name in own})
        group.update(own)
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)


def _decays(parameters: list[object]) -> bool:
    """Whether the weights of a group take weight decay. make_optimizer puts vectors into groups of their
    own, unless weight decay is 0 for all weights."""
    dimensions = {getattr(parameter, "ndim", 0) > 1 for parameter in parameters}
    if len(dimensions) > 1:
        raise ValueError(
            "weight_decay of a single step: the optimizer was made with weight_decay=0 and has matrices and "
            "vectors in one group. Set actor_rollout_ref.actor.optim.weight_decay to more than 0."
        )
    return True in dimensions


# --- loss scaling -------------------------------------------------------------------------------------------

_FIRST_SCALE = 2.0**16
_LARGEST_SCALE = 2.0**24
_PATIENCE = 100
"""Updates with finite gradients after which the scale doubles."""


class LossScale:
    """Loss scaling for float16, which has three more bits than bfloat16, but no numbers below 6e-8 or above
    65,504.

    The loss is multiplied by a power of two before the backward pass and gradients are divided by it
    afterwards, which is exact. It halves until gradients are finite, and doubles after many finite updates.
    """

    def __init__(self, value: float = _FIRST_SCALE) -> None:
        self.value = value
        self.quiet = 0
        """Updates since it last changed."""

    def shrink(self) -> bool:
        """After gradients that are not finite. False when the scale is 1 already, so it is not the cause."""
        if self.value <= 1:
            return False
        self.value = max(1.0, self.value / 2)
        self.quiet = 0
        return True

    def stepped(self) -> None:
        """After an update with finite gradients."""
        self.quiet += 1
        if self.quiet >= _PATIENCE and self.value < _LARGEST_SCALE:
            self.value *= 2
            self.quiet = 0

    def state(self) -> dict[str, float | int]:
        return {"value": self.value, "quiet": self.quiet}

    def load(self, state: dict[str, float | int]) -> None:
        self.value = float(state["value"])
        self.quiet = int(state["quiet"])
