"""Sequences of a packed row, as mixers take them in the rollout engine: by length, or padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_PADDED_TOKENS = 4096
"""Tokens of a padded group, at most: a function over whole rows needs about 20 float32 copies of them."""

Places = tuple[int, int, int]
"""Row, place of the first token in the packed row, length."""


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences of similar length as a rectangle."""

    members: Tensor
    """[B]: which sequences."""
    take: Tensor
    """[B, T]: places of their tokens in the packed row. Padding repeats the last token of the same sequence,
    so that a sequence with NaN spoils no other."""
    inside: Tensor
    """[B, T]: what is no padding."""


@dataclass(frozen=True)
class EqualGroup:
    """Sequences of one length."""

    take: Tensor
    """[B, length]: places of their tokens in the packed row."""
    rows: Tensor
    """[B]"""
    continued: bool
    """They continue the states of their rows."""


@dataclass(frozen=True)
class LastTokens:
    """A packed row in two parts, so that states can be kept before the last token of each sequence."""

    before: PackedSequences | None
    """All but the last tokens, as a packed row; None if there are none."""
    before_places: Tensor
    """Their places in the whole row."""
    last_places: Tensor
    """[S]"""
    empty: Tensor
    """Rows of the sequences that consist of their last token: their states begin empty."""


class PackedSequences:
    """Sequences (row, place of the first token, length) of a packed row. They begin with their first tokens,
    or continue the states of their rows."""

    def __init__(
        self,
        sequences: Sequence[Places],
        device: torch.device,
        continued: Sequence[bool] | None = None,
        slots: Sequence[int | None] | None = None,
    ) -> None:
        """`slots`: where the states before the last token of a sequence are kept, if anywhere."""
        self.sequences = sequences
        self.device = device
        self.continued = continued or [False] * len(sequences)
        self._slots = slots or [None] * len(sequences)

    @property
    def any_continued(self) -> bool:
        return any(self.continued)

    @cached_property
    def kept(self) -> tuple[Tensor, Tensor] | None:
        """Rows and slots of the states that are kept before the last token."""
        pairs = [(one[0], slot) for one, slot in zip(self.sequences, self._slots) if slot is not None]
        if not pairs:
            return None
        rows, slots = torch.tensor(pairs, device=self.device).unbind(1)
        return rows, slots

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, starts, lengths = torch.tensor(self.sequences, device=self.device).unbind(1)
        return rows, starts, lengths

    @property
    def rows(self) -> Tensor:
        return self._columns[0]

    @cached_property
    def positions(self) -> Tensor:
        """[N]: of each token in its sequence, as far as it is in this row."""
        found = [torch.arange(length) for _, _, length in self.sequences]
        return torch.cat(found).to(self.device)

    @cached_property
    def members(self) -> Tensor:
        """[N]: the sequence of each token."""
        lengths = self._columns[2]
        return torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)

    def last(self, count: int) -> tuple[Tensor, Tensor]:
        """[S, count]: places of the last tokens of each sequence, and their positions in it: those below 0
        are before this row."""
        _, starts, lengths = self._columns
        back = torch.arange(count - 1, -1, -1, device=self.device)
        positions = (lengths - 1)[:, None] - back
        return starts[:, None] + positions.clamp(min=0), positions

    @cached_property
    def by_length(self) -> list[EqualGroup]:
        """Sequences of one length run together: padding would be in their states."""
        found: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for (row, place, length), continued in zip(self.sequences, self.continued):
            found.setdefault((length, continued), []).append((row, place))
        groups = []
        for (length, continued), members in found.items():
            rows, places = torch.tensor(members, device=self.device).unbind(1)
            take = places[:, None] + torch.arange(length, device=self.device)
            groups.append(EqualGroup(take, rows, continued))
        return groups

    @cached_property
    def padded(self) -> list[PaddedGroup]:
        """Sequences of similar length together."""
        order = sorted(range(len(self.sequences)), key=lambda i: self.sequences[i][2])
        groups: list[list[int]] = []
        for member in order:
            length = self.sequences[member][2]
            if groups:
                shortest = self.sequences[groups[-1][0]][2]
                fits = (len(groups[-1]) + 1) * length <= _PADDED_TOKENS
                if fits and length <= 1.5 * shortest + 8:
                    groups[-1].append(member)
                    continue
            groups.append([member])
        return [self._padded_group(members) for members in groups]

    def _padded_group(self, members: list[int]) -> PaddedGroup:
        starts = torch.tensor([[self.sequences[i][1]] for i in members])
        lengths = torch.tensor([[self.sequences[i][2]] for i in members])
        columns = torch.arange(int(lengths.max()))[None]
        take = starts + torch.minimum(columns, lengths - 1)
        inside = columns < lengths
        return PaddedGroup(
            torch.tensor(members, device=self.device), take.to(self.device), inside.to(self.device)
        )

    @cached_property
    def last_tokens(self) -> LastTokens:
        """This row, cut before the last token of each sequence."""
        sequences: list[Places] = []
        continued: list[bool] = []
        before: list[int] = []
        last: list[int] = []
        empty: list[int] = []
        for (row, place, length), continues in zip(self.sequences, self.continued):
            last.append(place + length - 1)
            if length > 1:
                sequences.append((row, len(before), length - 1))
                continued.append(continues)
                before += range(place, place + length - 1)
            elif not continues:
                empty.append(row)
        device = self.device
        return LastTokens(
            PackedSequences(sequences, device, continued) if sequences else None,
            torch.tensor(before, dtype=torch.int64, device=device),
            torch.tensor(last, device=device),
            torch.tensor(empty, dtype=torch.int64, device=device),
        )
