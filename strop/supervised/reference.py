"""Reference log-probs of preference pairs: one number per response, computed once and stored in the run's
folder."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.preference import answer_log_probs
from strop.backends.base import MicroBatching, Outputs
from strop.data.supervised import PreferencePair, SupervisedDataset
from strop.run.checkpoint.tensor_files import read_tensors, write_tensors
from strop.supervised.tasks import PairBatch, is_trainable, pair_batch
from strop.types import Batch

log = logging.getLogger(__name__)

Forward = Callable[[Batch, Sequence[str], MicroBatching], Outputs]
FILE = "reference_log_probs.safetensors"
PAIRS_PER_PASS = 256
"""Pairs that are rendered and computed together."""


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
    file = folder / FILE
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
        aside = folder / f".{FILE}.new"
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
