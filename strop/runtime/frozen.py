"""Models that never learn, on machines of their own: a whole copy on every device, asked for a share of the rows each.

A copy has no state but its weights, so one that dies is simply made again and asked again. This file knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from strop.backends.base import MicroBatching, Outputs
from strop.data.balance import balanced_partitions, workload
from strop.ranks import Ranks
from strop.types import Batch, pad_columns


class Copies(Protocol):
    """The copies of one model, by number."""

    size: int

    def ask(self, number: int, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the `Frozen` with this number."""
        ...


@dataclass(frozen=True)
class Question:
    """What a model must see of a batch, as arrays: they travel many times faster than tensors."""

    ids: np.ndarray
    """All sequences, one after the other."""
    lengths: np.ndarray
    tables: dict[str, np.ndarray]
    """Other fields of the batch."""

    @staticmethod
    def of(batch: Batch, fields: Sequence[str] = ("prompt_lengths", "mask")) -> Question:
        ids = torch.cat(batch.sequences).numpy()
        return Question(ids, np.array(batch.lengths), {name: getattr(batch, name).numpy() for name in fields})

    @staticmethod
    def whole(batch: Batch) -> Question:
        """With everything that is known of the batch, since a loss may look at any of it."""
        known = [name for name, value in vars(batch).items() if value is not None and name != "sequences"]
        return Question.of(batch, known)

    def batch(self) -> Batch:
        sequences = torch.tensor(self.ids).split(self.lengths.tolist())
        return Batch(list(sequences), **{name: torch.tensor(table) for name, table in self.tables.items()})


class Frozen:
    """One copy, where it lives."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make` returns a backend or a `TokenScorer`."""
        self._make = make

    @cached_property
    def model(self) -> Any:
        return self._make()

    def ready(self) -> None:
        """The model is there, or whoever asks is told why not."""
        assert self.model is not None

    def forward(self, question: Question, want: Sequence[str], micro: MicroBatching) -> dict[str, np.ndarray]:
        found = vars(self.model.forward(question.batch(), want, micro))
        return {name: table.numpy() for name, table in found.items() if table is not None}

    def score(self, sequences: list[list[int]]) -> list[float]:
        return [float(score) for score in self.model.score(sequences)]


class FarReference:
    """The `forward` of a backend whose model is elsewhere. Rank 0 asks, since all ranks hold the same batch."""

    def __init__(self, copies: Copies, ranks: Ranks) -> None:
        self._copies, self._ranks = copies, ranks

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        def ask() -> Outputs:
            return self._ask(batch, want, micro) if self._ranks.lead else Outputs()

        return self._ranks.from_lead(self._ranks.together(ask, "asking the reference (actor_rollout_ref.ref.nnodes)"))

    def _ask(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        shares = shares_of(batch.lengths, self._copies.size)
        asked = [
            self._copies.ask(number, "forward", Question.of(batch.select(rows)), list(want), micro)
            for number, rows in enumerate(shares)
        ]
        width = batch.mask.shape[1]
        tables: dict[str, Tensor] = {}
        for rows, answer in zip(shares, asked, strict=True):
            for name, array in answer.result().items():
                found = torch.tensor(array)
                wide = found.dim() == 2
                table = tables.setdefault(name, torch.zeros(len(batch), width) if wide else torch.zeros(len(batch)))
                table[rows] = pad_columns(found, width) if wide else found
        return Outputs(**tables)


class FarScorer:
    """A reward model that is elsewhere. Every rank asks for the answers that it scores."""

    def __init__(self, copies: Copies, ranks: Ranks) -> None:
        self._copies, self._ranks = copies, ranks

    def score(self, sequences: list[list[int]]) -> list[float]:
        shares = shares_of([len(ids) for ids in sequences], self._copies.size)
        asked = [
            self._copies.ask((number + self._ranks.rank) % self._copies.size, "score", [sequences[row] for row in rows])
            for number, rows in enumerate(shares)
        ]
        scores = [0.0] * len(sequences)
        for rows, answer in zip(shares, asked, strict=True):
            for row, score in zip(rows, answer.result(), strict=True):
                scores[row] = score
        return scores


def shares_of(lengths: Sequence[int], copies: int) -> list[list[int]]:
    """Rows for each copy, of nearly equal work; fewer shares where there are fewer rows."""
    return balanced_partitions(workload(lengths).tolist(), min(copies, len(lengths))) if lengths else []
