"""Trajectories on their way to another rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from strop.types import Prompt, Trajectory


@dataclass(frozen=True)
class Parcel:
    """Tokens travel as three arrays: every rank unpacks those of all ranks, and lists of numbers cost it several times more.

    Prompts, which may have images, are known everywhere and do not travel.
    """

    rest: list[Trajectory]
    """Everything but tokens and prompts."""
    lengths: list[int]
    ids: np.ndarray
    mask: np.ndarray
    log_probs: np.ndarray
    """In the precision of a batch."""

    @staticmethod
    def of(made: Sequence[Trajectory]) -> Parcel:
        nobody = Prompt(-1, [], [], "")

        def joined(rows: Sequence[Sequence[float]], kind: type) -> np.ndarray:
            return np.concatenate([np.empty(0, kind), *(np.array(row, kind) for row in rows)])

        return Parcel(
            rest=[replace(t, prompt=nobody, response=[], mask=[], log_probs=[]) for t in made],
            lengths=[len(t.response) for t in made],
            ids=joined([t.response for t in made], np.int32),
            mask=joined([t.mask for t in made], np.int8),
            log_probs=joined([t.log_probs for t in made], np.float32),
        )

    def trajectories(self, prompts: Mapping[int, Prompt]) -> Iterator[Trajectory]:
        ids, mask, log_probs = self.ids.tolist(), self.mask.tolist(), self.log_probs.tolist()
        start = 0
        for t, length in zip(self.rest, self.lengths, strict=True):
            own = slice(start, start + length)
            yield replace(t, prompt=prompts[t.group], response=ids[own], mask=mask[own], log_probs=log_probs[own])
            start += length
