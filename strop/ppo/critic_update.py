"""The loss of the critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from strop.algorithms.aggregation import Totals, aggregate, mean_metric
from strop.algorithms.losses import value_loss
from strop.backends.base import Loss, Observe, Outputs
from strop.compat import conventions
from strop.config.schema.ppo import PpoConfig
from strop.types import Batch


@dataclass
class CriticUpdate:
    """The loss of the critic: values close to the returns, and not too far from the old values."""

    config: PpoConfig
    width: float
    observe: Observe | None = None

    def __post_init__(self) -> None:
        self.rules = conventions(self.config.algorithm.compat)

    def want(self) -> list[str]:
        """The outputs of the model that the loss needs."""
        return ["values"]

    def active(self, mini: Batch) -> Batch:
        """The rows that can change the weights: all."""
        return mini

    def loss(self, mini: Batch, active: Batch) -> Loss:
        """The loss of micro-batches, as parts of the loss of the whole mini-batch."""
        critic = self.config.critic
        totals = Totals.of(mini.mask, width=self.width)
        return CriticLoss(critic.cliprange_value, critic.loss_agg_mode, totals, self.observe)


@dataclass(frozen=True)
class CriticLoss:
    """A `Loss` that can be pickled and sent to a critic in another process."""

    clip_range: float
    mode: str
    totals: Totals
    observe: Observe | None = None

    def __call__(self, outputs: Outputs, micro: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        values = outputs.values
        assert values is not None and micro.values is not None and micro.returns is not None
        found = value_loss(values, micro.values, micro.returns, micro.mask, clip_range=self.clip_range)
        if self.observe is not None:
            self.observe(micro, found.per_token)
        total = aggregate(found.per_token, micro.mask, self.mode, self.totals)
        metrics = {
            "critic/vf_loss": total.detach(),
            "critic/vpred_mean": mean_metric(values, micro.mask, self.totals),
        }
        for name, table in found.metrics.items():
            metrics[f"critic/{name}"] = mean_metric(table, micro.mask, self.totals)
        return total, metrics
