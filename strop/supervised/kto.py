"""The task of KTO: single responses that are good or bad, and an estimate of the KL divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strop.algorithms.losses import answer_log_probs, kto, kto_kl
from strop.backends.base import Loss, MicroBatching, Outputs
from strop.config.schema.supervised import DpoLossConfig
from strop.data.supervised.labelled import LabelledAnswer
from strop.supervised.tasks import Forward, LoadBalance, PairBatch, mean_over_units, pair_batch
from strop.types import Batch


@dataclass
class KtoTask:
    """The policy learns to find good responses likelier than its reference, and bad ones less likely."""

    settings: DpoLossConfig
    aux_loss_coef: float = 0.0
    rows_per_item: int = 1

    def batch(self, items: Sequence[LabelledAnswer]) -> Batch:
        """Two rows per item: the response, and one to another prompt. `with_kl` leaves the first ones."""
        return pair_batch(items)

    def want(self, *, training: bool) -> list[str]:
        return ["log_probs", "auxiliary"] if training and self.aux_loss_coef else ["log_probs"]

    def units(self, batch: Batch) -> float:
        return float(len(batch))

    def validation_weight(self, batch: Batch) -> float:
        return self.units(batch)

    def loss(self, batch: Batch) -> Loss:
        count = self.units(batch)
        settings = self.settings
        balance = LoadBalance(self.aux_loss_coef, batch)

        def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            assert outputs.log_probs is not None and isinstance(piece, PairBatch)
            assert piece.reference is not None and piece.margins is not None and piece.kl is not None
            answers = answer_log_probs(outputs.log_probs, piece.mask)
            found = kto(
                answers,
                piece.reference.to(answers),
                piece.margins.to(answers),
                piece.kl.to(answers),
                beta=settings.beta,
                desirable_weight=settings.desirable_weight,
                undesirable_weight=settings.undesirable_weight,
            )
            value, metrics = mean_over_units(found, count)
            return balance.added(value, metrics, outputs, piece)

        return loss


def with_kl(batch: Batch, forward: Forward, micro: MicroBatching) -> Batch:
    """The responses of a batch with the KL estimate of the whole update, from its responses to other
    prompts under the weights before the update."""
    assert isinstance(batch, PairBatch) and batch.reference is not None
    mismatched = batch.select(range(1, len(batch), 2))
    assert isinstance(mismatched, PairBatch) and mismatched.reference is not None
    log_probs = forward(mismatched, ["log_probs"], micro).log_probs
    assert log_probs is not None
    kl = kto_kl(answer_log_probs(log_probs, mismatched.mask), mismatched.reference)
    answers = batch.select(range(0, len(batch), 2))
    return answers.replace(kl=kl.repeat(len(answers)))
