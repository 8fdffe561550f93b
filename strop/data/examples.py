"""Rows of supervised training as token ids, and those that stay in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strop.data.chat import Rendered
from strop.types import Images

CACHED_TOKENS = 50_000_000
"""Tokens of rendered rows that stay in memory: 250 MB. Rendering a row again takes longer than a step of a
small model."""


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt; the masks cover the answers."""

    chosen: Rendered
    rejected: Rendered
    margin: float = 0.0
    reference: tuple[float, float] | None = None
    """Log-probs of the two answers under the reference model, if they are known."""


Example = Rendered | PreferencePair


def images_of(example: Example) -> Images:
    """The images of a row."""
    return example.images if isinstance(example, Rendered) else example.chosen.images


class RowCache:
    """Rendered rows, five bytes a token, up to CACHED_TOKENS."""

    def __init__(self) -> None:
        self.items: dict[int, tuple[float, list[np.ndarray]]] = {}
        """Margin, then ids and mask of each answer."""
        self.tokens = 0

    def put(self, row: int, item: Example) -> None:
        """Keep an item if there is room."""
        margin = 0.0
        if isinstance(item, PreferencePair):
            margin = item.margin
            answers = [item.chosen, item.rejected]
        else:
            answers = [item]
        size = sum(len(answer.ids) for answer in answers)
        if self.tokens + size > CACHED_TOKENS:
            return
        self.tokens += size
        arrays: list[np.ndarray] = []
        for answer in answers:
            arrays.append(np.array(answer.ids, np.int32))
            arrays.append(np.array(answer.mask, np.uint8))
        self.items[row] = (margin, arrays)

    def get(self, row: int) -> Example | None:
        """Return the item of a row, None if it was not kept."""
        if row not in self.items:
            return None
        margin, arrays = self.items[row]
        lists = [array.tolist() for array in arrays]
        if len(lists) == 2:
            return Rendered(*lists)
        return PreferencePair(Rendered(*lists[:2]), Rendered(*lists[2:]), margin)

    def __reduce__(self) -> tuple[type[RowCache], tuple[()]]:
        return RowCache, ()  # a copy in another process starts empty
