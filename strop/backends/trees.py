"""Micro-batches of episodes with several sequences: those of one episode stay together, so that a packed row
contains their common prefixes once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from strop.data.balance import Partition


@dataclass
class TreePart:
    """Rows of one micro-batch, or a part of it."""

    rows: list[int] = field(default_factory=list)
    tokens: int = 0
    """A common beginning of neighbours counts once."""


def partition_trees(
    sequences: Sequence[Tensor], episodes: Sequence[int], *, rows: int, max_tokens: int | None
) -> Partition:
    """Row numbers of each micro-batch: at most `rows` rows, or, if it is given, at most `max_tokens` tokens.

    An episode that is larger is divided between neighbours in alphabetical order, which share most.
    """
    by_episode: dict[int, list[int]] = {}
    for row, episode in enumerate(episodes):
        by_episode.setdefault(episode, []).append(row)
    limit = rows if max_tokens is None else len(sequences)
    parts: list[TreePart] = []
    for members in by_episode.values():
        parts += _parts_of(members, sequences, limit, max_tokens)
    parts.sort(key=lambda part: -part.tokens)
    found: list[TreePart] = []
    for part in parts:
        _place(part, found, limit, max_tokens)
    return [part.rows for part in found]


def _parts_of(
    members: Sequence[int], sequences: Sequence[Tensor], limit: int, max_tokens: int | None
) -> list[TreePart]:
    """One episode in parts within the limits; a row that is too long is a part of its own."""
    ordered = sorted(members, key=lambda row: sequences[row].tolist())
    parts = [TreePart()]
    for row in ordered:
        part = parts[-1]
        length = len(sequences[row])
        new = length
        if part.rows:
            new -= common_beginning(sequences[part.rows[-1]], sequences[row])
        full = len(part.rows) >= limit or (max_tokens is not None and part.tokens + new > max_tokens)
        if part.rows and full:
            part = TreePart()
            parts.append(part)
            new = length
        part.rows.append(row)
        part.tokens += new
    return parts


def _place(part: TreePart, found: list[TreePart], limit: int, max_tokens: int | None) -> None:
    """Add a part to the first micro-batch that has room for it."""
    for one in found:
        fits = max_tokens is None or one.tokens + part.tokens <= max_tokens
        if fits and len(one.rows) + len(part.rows) <= limit:
            one.rows += part.rows
            one.tokens += part.tokens
            return
    found.append(TreePart(list(part.rows), part.tokens))


def common_beginning(one: Tensor, other: Tensor) -> int:
    """Tokens that are the same at the beginning of both."""
    length = min(len(one), len(other))
    differs = (one[:length] != other[:length]).nonzero()
    return int(differs[0]) if len(differs) else length
