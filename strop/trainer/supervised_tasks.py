"""What is taught: imitation (sft), judging pairs (rm), preferring answers (dpo). The loop is the same for all of them.

A loss is a mean over units (taught tokens, or pairs) of the whole update, and so is everything it reports.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from strop.algorithms.aggregation import Totals
from strop.algorithms.preference import PreferenceLoss, answer_log_probs
from strop.algorithms.sft import sft_loss
from strop.backends.base import Loss, Outputs
from strop.catalog import PREFERENCE_LOSSES
from strop.config.schema.supervised import DpoLoss, RmLoss
from strop.data.chat import Rendered
from strop.data.supervised import Pair
from strop.trainer.supervised_batches import PairBatch, conversations, pairs
from strop.types import Batch


class Task(Protocol):
    rows_per_item: int
    """Sequences that an item becomes; they are never parted."""

    def batch(self, items: Sequence[Any]) -> Batch:
        """Items that teach something, as tensors."""
        ...

    def want(self, *, training: bool) -> list[str]:
        """What the loss asks the model for."""
        ...

    def units(self, batch: Batch) -> float:
        """What the loss is a mean over: taught tokens, or pairs."""
        ...

    def loss(self, batch: Batch) -> Loss:
        """The loss of the whole update `batch`, to be called with pieces of it."""
        ...


@dataclass
class Imitation:
    """Cross entropy of every taught token."""

    aux_loss_coef: float = 0.0
    rows_per_item: int = 1

    def batch(self, items: Sequence[Rendered]) -> Batch:
        return conversations(items)

    def want(self, *, training: bool) -> list[str]:
        return ["log_probs", *(["auxiliary"] if training and self.aux_loss_coef else [])]

    def units(self, batch: Batch) -> float:
        return float(batch.mask.sum())

    def loss(self, batch: Batch) -> Loss:
        totals, balance = Totals.of(batch.mask), _Balance(self.aux_loss_coef, batch)

        def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            assert outputs.log_probs is not None
            value = sft_loss(outputs.log_probs, piece.mask, totals)
            return balance.added(value, {"loss": value.detach()}, outputs, piece)

        return loss


@dataclass
class Judging:
    """A reward model learns to score the chosen answer higher."""

    settings: RmLoss
    rows_per_item: int = 2

    def batch(self, items: Sequence[Pair]) -> Batch:
        return pairs(items)

    def want(self, *, training: bool) -> list[str]:
        return ["scores"]

    def units(self, batch: Batch) -> float:
        return len(batch) / 2

    def loss(self, batch: Batch) -> Loss:
        whole, settings = self.units(batch), self.settings
        function = PREFERENCE_LOSSES.get("sigmoid" if settings.type == "logsigmoid" else settings.type)

        def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            assert outputs.scores is not None and isinstance(piece, PairBatch) and piece.margins is not None
            chosen, rejected = outputs.scores[0::2], outputs.scores[1::2]
            more = {"margin": piece.margins[0::2].to(chosen)} if settings.margin else {}
            value, reported = _mean(function(chosen, rejected, **more), whole)
            squares = outputs.scores.detach().double().square().sum() / (2 * whole)
            return value, {**reported, "score_square": squares}

        return loss


@dataclass
class Preferring:
    """The policy itself learns to prefer the chosen answer (direct preference optimisation)."""

    settings: DpoLoss
    aux_loss_coef: float = 0.0
    rows_per_item: int = 2

    def batch(self, items: Sequence[Pair]) -> Batch:
        return pairs(items)

    def want(self, *, training: bool) -> list[str]:
        return ["log_probs", *(["auxiliary"] if training and self.aux_loss_coef else [])]

    def units(self, batch: Batch) -> float:
        return len(batch) / 2

    def loss(self, batch: Batch) -> Loss:
        whole, settings, balance = self.units(batch), self.settings, _Balance(self.aux_loss_coef, batch)
        entry = PREFERENCE_LOSSES.entry(settings.type)
        function, average = entry.load(), settings.length_normalized or entry.facts["length_normalised"]

        def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            assert outputs.log_probs is not None and isinstance(piece, PairBatch)
            answers = answer_log_probs(outputs.log_probs, piece.mask, average=average)
            known: dict[str, Any] = {"chosen": answers[0::2], "rejected": answers[1::2]}
            if piece.reference is not None:
                reference = piece.reference / piece.mask.sum(-1) if average else piece.reference
                known |= {"reference_chosen": reference[0::2], "reference_rejected": reference[1::2]}
            if settings.nll_coef:
                known["chosen_nll"] = -answer_log_probs(outputs.log_probs, piece.mask, average=True)[0::2]
            value, reported = _mean(function(**_taken(function, {**self._arguments(), **known})), whole)
            return balance.added(value, reported, outputs, piece)

        return loss

    def _arguments(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "beta": settings.beta,
            "label_smoothing": settings.label_smoothing,
            "margin": settings.target_margin,
            "nll_coef": settings.nll_coef,
        }


@dataclass
class _Balance:
    """The load-balancing loss of a mixture of experts; a piece weighs as much as it has tokens."""

    coef: float
    batch: Batch

    def added(
        self, value: Tensor, reported: dict[str, Tensor], outputs: Outputs, piece: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.coef or outputs.auxiliary is None:
            return value, reported
        share = outputs.auxiliary * (sum(piece.lengths) / sum(self.batch.lengths))
        return value + self.coef * share, {**reported, "aux_loss": share.detach()}


def _mean(found: PreferenceLoss, whole: float) -> tuple[Tensor, dict[str, Tensor]]:
    value = found.per_pair.sum() / whole
    return value, {"loss": value.detach(), **{name: numbers.sum() / whole for name, numbers in found.metrics.items()}}


def _taken(function: Any, available: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a loss names."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in available.items() if name in names}
