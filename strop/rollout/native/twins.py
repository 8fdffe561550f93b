"""Samples of one prompt that have sampled the same tokens so far: a step computes them once.

A policy that is nearly sure gives many samples the same beginning, and until they part their states are the same numbers. Rows
carry the number of their family; it is shared at first by the samples of a prompt, and a family parts where its members
sample different tokens. Families are exact: nothing is hashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.rollout.native.scheduler import Sample

_WORTH = 0.75
_TOKENS = 1 << 20
"""No vocabulary is larger."""


@dataclass(frozen=True)
class Twins:
    first: Tensor
    """[families] a row of each."""
    which: Tensor
    """[rows] the family of each row, as a place in `first`."""


class Families:
    def __init__(self) -> None:
        self._next = 0
        self._alike = False
        """Whether any two rows may still hold the same tokens."""

    def of_samples(self, samples: Sequence[Sample], fed: Sequence[bool]) -> list[int]:
        """Numbers for samples that are seated together: one for those that have nothing but the prompt of a request. Those that
        are fed are not at the end of theirs yet, and each is alone."""
        known: dict[int, int] = {}
        numbers = []
        for sample, alone in zip(samples, fed):
            number = self._next if sample.tokens or alone else known.setdefault(sample.request, self._next)
            self._next += number == self._next
            numbers.append(number)
        self._alike = True
        return numbers

    def parted(self, families: Tensor, newest: Tensor) -> Tensor:
        """New numbers for rows of these families after each has sampled its newest token."""
        if not self._alike:
            return families
        distinct, which = torch.unique(families * _TOKENS + newest, return_inverse=True)
        first = self._next
        self._next += len(distinct)
        return which + first

    def twins(self, families: Tensor) -> Twins | None:
        """Rows by family. None where they are nearly as many: then it is not worth the gathering."""
        if not self._alike:
            return None
        distinct, which = torch.unique(families, return_inverse=True)
        self._alike = len(distinct) < len(families)
        if len(distinct) > _WORTH * len(families):
            return None
        first = torch.full((len(distinct),), len(families)).scatter_reduce(0, which, torch.arange(len(families)), "amin")
        return Twins(first, which)
