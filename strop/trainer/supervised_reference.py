"""What a frozen reference thinks of the answers of preference pairs: one number per answer, computed once and remembered."""

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
from strop.run.tensor_file import read_tensors, write_tensors
from strop.trainer.supervised_batches import PairBatch, pairs, teaches
from strop.types import Batch

log = logging.getLogger(__name__)

Forward = Callable[[Batch, Sequence[str], MicroBatching], Outputs]
FILE = "reference_log_probs.safetensors"
AT_ONCE = 256
"""Pairs that are rendered and computed together."""


def reference_sums(forward: Forward, batch: Batch, micro: MicroBatching) -> Tensor:
    """The log-prob of each whole answer [B]."""
    log_probs = forward(batch, ["log_probs"], micro).log_probs
    assert log_probs is not None
    return answer_log_probs(log_probs, batch.mask)


class RememberedReference(Sequence[Any]):
    """Pairs with the reference's log-probs of both answers.

    `table` is [pairs, 2], NaN where nobody has asked yet. It is kept in the run's folder, so that a resume need not ask again.
    """

    def __init__(self, dataset: Any, table: Tensor):
        self.dataset, self.table = dataset, table

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Any) -> Any:
        pair = self.dataset[place]
        chosen, rejected = self.table[int(place)].tolist()
        return None if pair is None else dataclasses.replace(pair, reference=(chosen, rejected))

    def fingerprint(self) -> str:
        return str(self.dataset.fingerprint())


def remember(
    dataset: Any,
    places: Sequence[int],
    forward: Forward,
    micro: MicroBatching,
    *,
    folder: Path,
    who: str,
    write: bool = True,
) -> RememberedReference:
    """`dataset` with the reference's log-probs at `places`; what an earlier process of the run computed is read again.

    Of many ranks that know the same, one should `write` it.
    """
    name = hashlib.sha256(f"{dataset.fingerprint()} {who} {dataset.config}".encode()).hexdigest()[:24]
    file = folder / FILE
    known = read_tensors(file) if file.exists() else {}
    table = known.get(name, torch.full((len(dataset), 2), torch.nan))
    missing = [place for place in places if bool(table[place].isnan().any())]
    if missing:
        log.info("The reference reads %d pairs once.", len(missing))
        for start in range(0, len(missing), AT_ONCE):
            _fill(table, dataset, missing[start : start + AT_ONCE], forward, micro)
    if missing and write:
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{FILE}.new"
        write_tensors(aside, {**known, name: table})
        aside.replace(file)
    return RememberedReference(dataset, table)


def _fill(table: Tensor, dataset: Any, places: list[int], forward: Forward, micro: MicroBatching) -> None:
    items = {place: dataset[place] for place in places}
    usable = [place for place in places if teaches(items[place])]
    table[places] = 0.0  # what cannot be used has been looked at as well
    if usable:
        sums = reference_sums(forward, pairs([items[place] for place in usable]), micro)
        table[usable] = sums.view(-1, 2)


def with_reference(batch: Batch, forward: Forward, micro: MicroBatching) -> Batch:
    """`batch` with the answer of a reference that is asked now."""
    assert isinstance(batch, PairBatch)
    return batch.replace(reference=reference_sums(forward, batch, micro))
