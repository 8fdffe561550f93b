"""Trajectories on their way to another rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from strop.types import Prompt, TokenArrays, Trajectory

STAYS = ("prompt", *TokenArrays._fields)
"""What does not travel in the rest of a trajectory: tokens go as arrays, and prompts, which may have images, are known
everywhere."""


@dataclass(frozen=True)
class Parcel:
    """Tokens travel as three arrays and stay arrays on arrival: every rank is told those of all ranks, so whatever is done with
    them one by one is done for the whole cluster."""

    rest: list[dict[str, Any]]
    """Everything but tokens and prompts."""
    lengths: list[int]
    tokens: TokenArrays
    """Of all trajectories, one after the other."""

    @staticmethod
    def of(made: Sequence[Trajectory]) -> Parcel:
        arrays = [t.arrays for t in made]
        names = [field.name for field in fields(Trajectory) if field.name not in STAYS]
        return Parcel(
            rest=[{name: getattr(t, name) for name in names} for t in made],
            lengths=[len(one.mask) for one in arrays],
            tokens=TokenArrays(*(np.concatenate(column) for column in zip(TokenArrays.of([], [], []), *arrays))),
        )

    def trajectories(self, prompts: Mapping[int, Prompt]) -> Iterator[Trajectory]:
        start = 0
        for rest, length in zip(self.rest, self.lengths, strict=True):
            own = TokenArrays(*(column[start : start + length] for column in self.tokens))
            yield Arrived.of(own, prompt=prompts[rest["group"]], **rest)
            start += length


class Arrived(Trajectory):  # noqa: PLW1641 -- like every trajectory it has no hash
    """A trajectory whose tokens are arrays. Who asks for a list of them gets one, which then is what counts."""

    _came: TokenArrays

    @classmethod
    def of(cls, tokens: TokenArrays, **rest: Any) -> Arrived:
        arrived = cls.__new__(cls)
        vars(arrived).update(rest, _came=tokens)
        return arrived

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there yet."""
        if name not in TokenArrays._fields:
            raise AttributeError(name)
        vars(self)[name] = getattr(self._came, name).tolist()
        return vars(self)[name]

    @property
    def sampled(self) -> int:
        return int(np.count_nonzero(self.arrays.mask))

    @property
    def arrays(self) -> TokenArrays:
        return self._came if vars(self).keys().isdisjoint(TokenArrays._fields) else super().arrays

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Trajectory)
        return same and all(getattr(self, field.name) == getattr(other, field.name) for field in fields(Trajectory))
