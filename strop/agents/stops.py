"""Texts that end an answer: it ends before the first of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[list[int]], tuple[str, str]]
"""The text of ids, with special tokens and without."""


@dataclass(frozen=True)
class AnswerEnd:
    """Where an answer is cut."""

    stop: str
    """The stop text; empty if the answer has none."""
    kept: int
    """Tokens of the answer, at least one. The last may hold the beginning of the stop text, as `)\\n` does
    of `\\nObservation`: without it, text before the stop text would be lost."""
    place: int
    """Characters before the stop text, with special tokens."""

    @classmethod
    def find(cls, decode: Decode, ids: Sequence[int], stops: Sequence[str]) -> AnswerEnd:
        """Return the end of an answer that may hold some of these texts."""
        text = _text(decode, ids) if any(stops) else ""
        places = [(text.find(stop), stop) for stop in stops if stop and stop in text]
        if not places:
            return cls("", len(ids), 0)
        place, stop = min(places)
        low, high = 0, len(ids)
        while high - low > 1:
            middle = (low + high) // 2
            if _text(decode, ids[:middle]).startswith(text[:place]):
                high = middle
            else:
                low = middle
        return cls(stop, high, place)

    def cut(self, text: str, plain: str) -> tuple[str, str]:
        """Return the text of the kept tokens, with special tokens and without, up to the stop text."""
        if not self.stop:
            return text, plain
        over = max(0, len(text) - self.place)
        return text[: self.place], plain[: max(0, len(plain) - over)]


def _text(decode: Decode, ids: Sequence[int]) -> str:
    return decode(list(ids))[0]
