"""One optimizer update with other hyperparameters than those of the configuration."""

from __future__ import annotations

import contextlib
import warnings
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


@contextlib.contextmanager
def quiet_about_order() -> Iterator[None]:
    """A skipped update (or a trainer step without one, as in critic warm-up) makes torch warn about the order
    of optimizer and scheduler."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield
