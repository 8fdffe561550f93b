"""The reference log-probs of preference training, one number per response: computed in every step, or once
before training and stored in the run's folder."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from strop.algorithms.losses import answer_log_probs
from strop.backends.base import MicroBatching
from strop.config.schema.supervised import DpoConfig
from strop.data.examples import PreferencePair
from strop.data.supervised.datasets import SupervisedDataset
from strop.ranks import Ranks
from strop.run.checkpoint.tensor_files import read_tensors, write_tensors
from strop.supervised.tasks import Forward, PairBatch, is_trainable, pair_batch
from strop.types import Batch

log = logging.getLogger(__name__)
REFERENCE_FILE = "reference_log_probs.safetensors"
PAIRS_PER_PASS = 256
"""Pairs that are rendered and computed together."""


def reference_sums(forward: Forward, batch: Batch, micro: MicroBatching) -> Tensor:
    """The log-prob of each whole response [B]."""
    log_probs = forward(batch, ["log_probs"], micro).log_probs
    assert log_probs is not None
    return answer_log_probs(log_probs, batch.mask)


def with_reference(batch: Batch, forward: Forward, micro: MicroBatching) -> Batch:
    """`batch` with reference log-probs that are computed now."""
    assert isinstance(batch, PairBatch)
    return batch.replace(reference=reference_sums(forward, batch, micro))


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
        known = self.table[int(place)]
        if known.isnan().any():
            raise ValueError(
                f"The reference log-probs of pair {int(place)} were not computed before training: the "
                "checkpoint draws other pairs than data.train_batch_size, data.seed and "
                "trainer.total_training_steps say. Set these as they were, or loss.precompute_ref=false."
            )
        chosen, rejected = known.tolist()
        return dataclasses.replace(pair, reference=(chosen, rejected))

    def fingerprint(self) -> str:
        return str(self.dataset.fingerprint())


@dataclass(frozen=True)
class ReferencePass:
    """Computes reference log-probs before training."""

    config: DpoConfig
    forward: Forward
    micro: MicroBatching
    ranks: Ranks

    def add(self, rows: SupervisedDataset, places: Sequence[int]) -> PairsWithReference:
        """The rows with reference log-probs at `places`, which the run will draw if it starts anew. What an
        earlier process of the run stored is read."""
        name = self._name(rows)
        known = self.ranks.run_or_raise_on_all(self._stored, "reading the reference log-probs")
        if known and name not in known and self.config.trainer.resume_mode != "disable":
            # The run goes on with other settings: its checkpoint may draw any row.
            places = range(len(rows))
        # Those of rank 0: all ranks must miss the same pairs, because they compute them together.
        empty = torch.full((len(rows), 2), torch.nan)
        table, places = self.ranks.broadcast_object((known.get(name, empty), places))
        missing = [place for place in places if bool(table[place].isnan().any())]
        if missing:
            log.info("The reference reads %d pairs once.", len(missing))
            for start in range(0, len(missing), PAIRS_PER_PASS):
                self._fill(table, rows, missing[start : start + PAIRS_PER_PASS])
            if self.ranks.is_rank0:
                self._store({**known, name: table})
        return PairsWithReference(rows, table)

    @property
    def _file(self) -> Path:
        return Path(self.config.trainer.default_local_dir).expanduser() / REFERENCE_FILE

    def _stored(self) -> dict[str, Tensor]:
        """Tables of all data sets of the run, by name; on rank 0 only."""
        if not self.ranks.is_rank0 or not self._file.exists():
            return {}
        try:
            return read_tensors(self._file)
        except SafetensorError as problem:
            log.warning("%s is damaged (%s) and is computed again.", self._file, problem)
            return {}

    def _store(self, tables: Mapping[str, Tensor]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        aside = self._file.with_name(f".{REFERENCE_FILE}.new")
        write_tensors(aside, tables)
        aside.replace(self._file)

    def _name(self, rows: SupervisedDataset) -> str:
        """Changes with the rows, with how they become items (kto: one per response) and tokens, with the
        weights, and with what the model computes with them."""
        facts: list[object] = [type(rows).__name__, rows.fingerprint(), rows.config]
        facts.append(rows.chat.template or rows.chat.tokenizer.chat_template)
        model = self.config.model
        facts += [model.override_config, model.quantization, model.fsdp_config.dtype]
        for path in (
            self.config.ref.path,
            model.tokenizer_path,
            model.lora_adapter_path,
            model.hf_config_path,
        ):
            facts += [path, _versions(path)]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]

    def _fill(self, table: Tensor, rows: SupervisedDataset, places: list[int]) -> None:
        items = {place: rows[place] for place in places}
        usable = [place for place in places if is_trainable(items[place])]
        table[places] = 0.0  # also for pairs that cannot be used: they are done
        if usable:
            batch = pair_batch([items[place] for place in usable])
            table[usable] = reference_sums(self.forward, batch, self.micro).view(-1, 2)


def _versions(path: str | None) -> list[tuple[str, int, int]]:
    """Name, size and modification time of the files of a model; empty for a name of the hub."""
    if path is None:
        return []
    place = Path(path).expanduser()
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    found = []
    for file in files:
        if file.is_file():
            facts = file.stat()
            found.append((file.name, facts.st_size, facts.st_mtime_ns))
    return found
