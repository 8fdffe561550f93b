"""The tasks of supervised training: sft (cross entropy), rm (scores of pairs) and dpo (preferences).

A loss is a mean over units (trained tokens, or pairs) of the whole update, and so is every metric. The
reference log-probs of dpo, one number per response, are computed once and stored in the run's folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from strop.data.labelled import LabelledAnswer
from strop.data.supervised import SupervisedDataset
from strop.run.checkpoint.tensor_files import read_tensors, write_tensors
from strop.shared.rendered_batch import batch_fields, rendered_batch
from strop.types import Batch, rows

Item = Example | None
"""A row of a data set: a conversation (sft) or a pair (rm, dpo). None: it is longer than allowed."""
log = logging.getLogger(__name__)
Forward = Callable[[Batch, Sequence[str], MicroBatching], Outputs]
REFERENCE_FILE = "reference_log_probs.safetensors"
PAIRS_PER_PASS = 256
"""Pairs that are rendered and computed together."""


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
    if isinstance(item, LabelledAnswer):
        return any(item.chosen.mask) and any(item.rejected.mask)
    if isinstance(item, PreferencePair):
        return any(item.chosen.mask) and any(item.rejected.mask) and item.chosen.ids != item.rejected.ids
    return any(item.mask[1:])  # the first token of a text is not predicted


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
        if settings.type == "ipo":
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


def reference_sums(forward: Forward, batch: Batch, micro: MicroBatching) -> Tensor:
    """The log-prob of each whole response [B]."""
    log_probs = forward(batch, ["log_probs"], micro).log_probs
    assert log_probs is not None
    return answer_log_probs(log_probs, batch.mask)


class PairsWithReference(Sequence[PreferencePair | None]):
    """Pairs with the reference log-probs of both responses.

    `table` is [pairs, 2], with NaN where nothing was computed.
    """

    def __init__(self, dataset: SupervisedDataset, table: Tensor):
        self.dataset = dataset
        self.table = table

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Any) -> Any:
        pair = self.dataset[place]
        if pair is None:
            return None
        chosen, rejected = self.table[int(place)].tolist()
        return dataclasses.replace(pair, reference=(chosen, rejected))

    def fingerprint(self) -> str:
        return str(self.dataset.fingerprint())


def precompute_reference(
    dataset: SupervisedDataset,
    places: Sequence[int],
    forward: Forward,
    micro: MicroBatching,
    *,
    folder: Path,
    model_name: str,
    write: bool = True,
) -> PairsWithReference:
    """`dataset` with the reference log-probs at `places`. What an earlier process of the run stored is read.

    All ranks compute the same; one of them should `write` it.
    """
    name = hashlib.sha256(f"{dataset.fingerprint()} {model_name} {dataset.config}".encode()).hexdigest()[:24]
    file = folder / REFERENCE_FILE
    known: dict[str, Tensor] = {}
    if file.exists():
        known = read_tensors(file)
    table = known.get(name, torch.full((len(dataset), 2), torch.nan))
    missing = [place for place in places if bool(table[place].isnan().any())]
    if missing:
        log.info("The reference reads %d pairs once.", len(missing))
        for start in range(0, len(missing), PAIRS_PER_PASS):
            _fill(table, dataset, missing[start : start + PAIRS_PER_PASS], forward, micro)
    if missing and write:
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{REFERENCE_FILE}.new"
        write_tensors(aside, {**known, name: table})
        aside.replace(file)
    return PairsWithReference(dataset, table)


def _fill(
    table: Tensor, dataset: SupervisedDataset, places: list[int], forward: Forward, micro: MicroBatching
) -> None:
    items = {place: dataset[place] for place in places}
    usable = [place for place in places if is_trainable(items[place])]
    table[places] = 0.0  # also for pairs that cannot be used: they are done
    if usable:
        sums = reference_sums(forward, pair_batch([items[place] for place in usable]), micro)
        table[usable] = sums.view(-1, 2)


def with_reference(batch: Batch, forward: Forward, micro: MicroBatching) -> Batch:
    """`batch` with reference log-probs that are computed now."""
    assert isinstance(batch, PairBatch)
    return batch.replace(reference=reference_sums(forward, batch, micro))
