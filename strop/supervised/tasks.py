"""The tasks of supervised training: sft (cross entropy), rm (scores of pairs) and dpo (preferences).

A loss is a mean over units (trained tokens, or pairs) of the whole update, and so is every metric.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from strop.algorithms.aggregation import Totals
from strop.algorithms.losses import PreferenceLoss, answer_log_probs, sft_loss
from strop.backends.base import Loss, MicroBatching, Outputs
from strop.catalog import PREFERENCE_LOSSES
from strop.compat import STROP, Conventions
from strop.config.schema.supervised import DpoLossConfig, RmLossConfig
from strop.data.chat import Rendered
from strop.data.examples import Example, PreferencePair
from strop.data.supervised.labelled import LabelledAnswer
from strop.shared.rendered_batch import batch_fields, rendered_batch
from strop.types import Batch, rows

Item = Example | None
"""A row of a data set: a conversation (sft) or a pair (rm, dpo). None: it is longer than allowed."""
Forward = Callable[[Batch, Sequence[str], MicroBatching], Outputs]


@dataclass
class PairBatch(Batch):
    """Pairs as rows: a chosen answer, then the rejected one of the same pair."""

    margins: Tensor | None = rows()
    """How much better the chosen answer of the pair is."""
    reference: Tensor | None = rows()
    """The reference's log-prob of each answer, summed over its taught tokens."""
    kl: Tensor | None = rows()
    """kto: the estimate of the KL divergence to the reference, the same number for all rows."""


def pair_batch(items: Sequence[PreferencePair]) -> PairBatch:
    """The batch of preference pairs, two rows per pair."""
    sides: list[Rendered] = []
    margins: list[float] = []
    known: list[tuple[float, float]] = []
    for pair in items:
        sides += [pair.chosen, pair.rejected]
        margins += [pair.margin, pair.margin]
        if pair.reference is not None:
            known.append(pair.reference)
    assert len(known) in (0, len(items)), "the reference knows all pairs of a batch or none"
    reference = None
    if known:
        reference = torch.tensor(known, dtype=torch.float32).flatten()
    return PairBatch(**batch_fields(sides), margins=torch.tensor(margins), reference=reference)


def is_trainable(item: Item) -> bool:
    """Whether a row still has something to train on after it was cut to its limit."""
    if item is None:
        return False
    if not isinstance(item, PreferencePair):
        return _predicts(item)
    both = _predicts(item.chosen) and _predicts(item.rejected)
    return both and (isinstance(item, LabelledAnswer) or item.chosen.ids != item.rejected.ids)


def _predicts(text: Rendered) -> bool:
    """Whether a text has a trained token that is predicted; its first token is not."""
    return any(text.mask[1:])


class Task(Protocol):
    """The data and the loss of a supervised trainer."""

    rows_per_item: int
    """Sequences per item; they stay in one micro-batch."""

    def batch(self, items: Sequence[Any]) -> Batch:
        """Trainable items as tensors."""
        ...

    def want(self, *, training: bool) -> list[str]:
        """The outputs of the model that the loss needs."""
        ...

    def units(self, batch: Batch) -> float:
        """What the loss is a mean over: trained tokens, or pairs."""
        ...

    def validation_weight(self, batch: Batch) -> float:
        """The weight of a batch in means over all validation rows."""
        ...

    def loss(self, batch: Batch) -> Loss:
        """The loss of the whole update `batch`, to be called with micro-batches of it."""
        ...


@dataclass
class SftTask:
    """Cross entropy of every trained token."""

    aux_loss_coef: float = 0.0
    rules: Conventions = STROP
    rows_per_item: int = 1

    def batch(self, items: Sequence[Rendered]) -> Batch:
        return rendered_batch(items)

    def want(self, *, training: bool) -> list[str]:
        return ["log_probs", "auxiliary"] if training and self.aux_loss_coef else ["log_probs"]

    def units(self, batch: Batch) -> float:
        return float(batch.mask.sum())

    def validation_weight(self, batch: Batch) -> float:
        if self.rules.validation_loss == "batches":
            return 1.0
        if self.rules.validation_loss == "rows":
            return float(len(batch))
        return self.units(batch)

    def loss(self, batch: Batch) -> Loss:
        totals = Totals.of(batch.mask)
        balance = LoadBalance(self.aux_loss_coef, batch)

        def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            assert outputs.log_probs is not None
            value = sft_loss(outputs.log_probs, piece.mask, totals)
            return balance.added(value, {"loss": value.detach()}, outputs, piece)

        return loss


@dataclass
class RewardModelTask:
    """A reward model learns to score the chosen response higher."""

    settings: RmLossConfig
    rows_per_item: int = 2

    def batch(self, items: Sequence[PreferencePair]) -> Batch:
        return pair_batch(items)

    def want(self, *, training: bool) -> list[str]:
        return ["scores"]

    def units(self, batch: Batch) -> float:
        return len(batch) / 2

    def validation_weight(self, batch: Batch) -> float:
        return self.units(batch)

    def loss(self, batch: Batch) -> Loss:
        pairs = self.units(batch)
        name = "sigmoid" if self.settings.type == "logsigmoid" else self.settings.type
        function = PREFERENCE_LOSSES.get(name)

        def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            assert outputs.scores is not None and isinstance(piece, PairBatch) and piece.margins is not None
            chosen = outputs.scores[0::2]
            rejected = outputs.scores[1::2]
            margin = {"margin": piece.margins[0::2].to(chosen)} if self.settings.margin else {}
            value, metrics = mean_over_units(function(chosen, rejected, **margin), pairs)
            metrics["score_square"] = outputs.scores.detach().double().square().sum() / (2 * pairs)
            return value, metrics

        return loss


@dataclass
class DpoTask:
    """The policy learns to prefer the chosen response (direct preference optimisation)."""

    settings: DpoLossConfig
    aux_loss_coef: float = 0.0
    rules: Conventions = STROP
    rows_per_item: int = 2

    def batch(self, items: Sequence[PreferencePair]) -> Batch:
        return pair_batch(items)

    def want(self, *, training: bool) -> list[str]:
        return ["log_probs", "auxiliary"] if training and self.aux_loss_coef else ["log_probs"]

    def units(self, batch: Batch) -> float:
        return len(batch) / 2

    def validation_weight(self, batch: Batch) -> float:
        return self.units(batch)

    def loss(self, batch: Batch) -> Loss:
        pairs = self.units(batch)
        settings = self.settings
        balance = LoadBalance(self.aux_loss_coef, batch)
        entry = PREFERENCE_LOSSES.entry(settings.type)
        function = entry.load()
        average: bool = entry.facts["length_normalised"]
        if entry.name == "ipo":
            average = self.rules.ipo_log_probs == "averaged"
        if settings.length_normalized is not None:
            average = settings.length_normalized

        def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            assert outputs.log_probs is not None and isinstance(piece, PairBatch)
            answers = answer_log_probs(outputs.log_probs, piece.mask, average=average)
            arguments = self._settings()
            arguments |= {"chosen": answers[0::2], "rejected": answers[1::2]}
            if piece.reference is not None:
                reference = piece.reference / piece.mask.sum(-1) if average else piece.reference
                arguments |= {"reference_chosen": reference[0::2], "reference_rejected": reference[1::2]}
            if settings.nll_coef or "chosen_nll" in entry.facts["needs"]:
                arguments["chosen_nll"] = self._chosen_nll(outputs.log_probs[0::2], piece.mask[0::2])
            value, metrics = mean_over_units(function(**_accepted(function, arguments)), pairs)
            return balance.added(value, metrics, outputs, piece)

        return loss

    def _chosen_nll(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        """The negative log-likelihood of the chosen answers, one number per pair."""
        if self.rules.chosen_nll == "answers":
            return -answer_log_probs(log_probs, mask, average=True)
        sums = answer_log_probs(log_probs, mask)
        return (-sums.sum() / mask.sum().clamp(min=1)).expand(len(sums))

    def _settings(self) -> dict[str, object]:
        settings = self.settings
        return {
            "beta": settings.beta,
            "label_smoothing": settings.label_smoothing,
            "margin": settings.target_margin,
            "nll_coef": settings.nll_coef,
        }


@dataclass
class LoadBalance:
    """The load-balancing loss of a mixture of experts. A micro-batch has the weight of its tokens."""

    coef: float
    batch: Batch

    def added(
        self, value: Tensor, reported: dict[str, Tensor], outputs: Outputs, piece: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.coef or outputs.auxiliary is None:
            return value, reported
        share = outputs.auxiliary * (sum(piece.lengths) / sum(self.batch.lengths))
        return value + self.coef * share, {**reported, "aux_loss": share.detach()}


def mean_over_units(found: PreferenceLoss, pairs: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its metrics as parts of means over all pairs of the update."""
    value = found.per_pair.sum() / pairs
    metrics = {"loss": value.detach()}
    for name, numbers in found.metrics.items():
        metrics[name] = numbers.sum() / pairs
    return value, metrics


def _accepted(function: Callable[..., PreferenceLoss], available: Mapping[str, object]) -> dict[str, Any]:
    """Those of the arguments that the loss names."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in available.items() if name in names}
