"""Frozen models on their own machines: a whole copy on every device, and clients that divide the rows.

Reference policies and reward models never learn. A copy has no state but its weights, so one that dies is
restarted and called again. This file knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from strop.backends.base import Backend, MicroBatching, Outputs
from strop.data.balance import balanced_partitions, workload
from strop.ranks import Ranks
from strop.rewards.model import TokenScorer
from strop.runtime.launch import enter_folder
from strop.types import Batch, Images, pad_columns

ServedModel = Backend | TokenScorer


class ModelCopies(Protocol):
    """The copies of one model, by number."""

    size: int

    def call(self, number: int, method: str, *arguments: object) -> Future[Any]:
        """Call a method of the `FrozenModel` with this number."""
        ...


@dataclass(frozen=True)
class BatchArrays:
    """A batch as numpy arrays. Between processes they travel many times faster than tensors."""

    ids: np.ndarray
    """All sequences, concatenated."""
    lengths: np.ndarray
    tables: dict[str, np.ndarray]
    """Other fields of the batch."""
    images: list[Images] | None = None
    """Pickled once; rows of a group share them there too."""

    @staticmethod
    def of(batch: Batch, fields: Sequence[str] = ("prompt_lengths", "mask")) -> BatchArrays:
        """Take the sequences and these fields of a batch."""
        ids = torch.cat(batch.sequences).numpy()
        tables = {name: getattr(batch, name).numpy() for name in fields}
        return BatchArrays(ids, np.array(batch.lengths), tables, batch.images)

    @staticmethod
    def with_all_fields(batch: Batch) -> BatchArrays:
        """Take everything that the batch has, since a loss may read any of it."""
        skipped = ("sequences", "images")
        fields = [name for name, value in vars(batch).items() if value is not None and name not in skipped]
        return BatchArrays.of(batch, fields)

    def batch(self) -> Batch:
        """Return the batch again."""
        sequences = torch.tensor(self.ids).split(self.lengths.tolist())
        tensors: dict[str, Any] = {name: torch.tensor(table) for name, table in self.tables.items()}
        return Batch(list(sequences), images=self.images, **tensors)


def output_arrays(outputs: Outputs) -> dict[str, np.ndarray]:
    """Return the fields of `outputs` that are set, as arrays."""
    return {name: table.numpy() for name, table in vars(outputs).items() if table is not None}


class FrozenModel:
    """One copy, in the process that holds it."""

    def __init__(self, make: Callable[[], ServedModel], folder: str = ".") -> None:
        """`folder`: where relative paths begin."""
        self._make = make
        self._folder = folder

    @cached_property
    def model(self) -> ServedModel:
        enter_folder(self._folder)
        return self._make()

    def ready(self) -> None:
        """Build the model; raises when that fails."""
        assert self.model is not None

    def forward(
        self, arrays: BatchArrays, want: Sequence[str], micro: MicroBatching
    ) -> dict[str, np.ndarray]:
        """Run `Backend.forward` over a share of the rows."""
        backend = cast(Backend, self.model)
        return output_arrays(backend.forward(arrays.batch(), want, micro))

    def score(self, sequences: list[list[int]], images: list[Images] | None = None) -> list[float]:
        """Score a share of the sequences."""
        scorer = cast(TokenScorer, self.model)
        more = () if images is None else (images,)
        return [float(score) for score in scorer.score(sequences, *more)]


class RemoteReference:
    """The `forward` of a backend whose model is on other machines.

    All ranks hold the same batch, so rank 0 calls the copies and broadcasts the outputs.
    """

    def __init__(
        self, copies: ModelCopies, ranks: Ranks, name: str = "reference (actor_rollout_ref.ref.nnodes)"
    ) -> None:
        """`name` is that of errors: the role and its key."""
        self._copies = copies
        self._ranks = ranks
        self._name = name

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        """Return the outputs of the whole batch, on every rank."""

        def call() -> Outputs:
            if self._ranks.is_rank0:
                return self._call_copies(batch, want, micro)
            return Outputs()

        outputs = self._ranks.run_or_raise_on_all(call, f"asking the {self._name}")
        return self._ranks.broadcast_object(outputs)

    def _call_copies(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        shares = balanced_shares(batch.lengths, self._copies.size)
        calls = []
        for number, rows in enumerate(shares):
            arrays = BatchArrays.of(batch.select(rows))
            calls.append(self._copies.call(number, "forward", arrays, list(want), micro))
        width = batch.mask.shape[1]
        tables: dict[str, Tensor] = {}
        for rows, call in zip(shares, calls, strict=True):
            for name, array in call.result().items():
                found = torch.tensor(array)
                if found.dim() >= 2:
                    empty = torch.zeros(len(batch), width, *found.shape[2:], dtype=found.dtype)
                    table = tables.setdefault(name, empty)
                    table[rows] = pad_columns(found, width)
                else:
                    table = tables.setdefault(name, torch.zeros(len(batch)))
                    table[rows] = found
        return Outputs(**tables)


class RemoteTokenScorer:
    """A reward model on other machines. Every rank calls it for the responses that it scores."""

    def __init__(self, copies: ModelCopies, ranks: Ranks) -> None:
        self._copies = copies
        self._ranks = ranks

    def score(self, sequences: list[list[int]], images: Sequence[Images] | None = None) -> list[float]:
        """Return the score of each sequence."""
        shares = balanced_shares([len(ids) for ids in sequences], self._copies.size)
        calls = []
        for number, rows in enumerate(shares):
            copy = (number + self._ranks.rank) % self._copies.size  # ranks begin with different copies
            shown = None if images is None else [images[row] for row in rows]
            calls.append(self._copies.call(copy, "score", [sequences[row] for row in rows], shown))
        scores = [0.0] * len(sequences)
        for rows, call in zip(shares, calls, strict=True):
            for row, score in zip(rows, call.result(), strict=True):
                scores[row] = score
        return scores


def balanced_shares(lengths: Sequence[int], copies: int) -> list[list[int]]:
    """Return the rows of each copy, of nearly equal work; fewer shares when there are fewer rows."""
    if not lengths:
        return []
    return balanced_partitions(workload(lengths).tolist(), min(copies, len(lengths)))
