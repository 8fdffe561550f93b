"""What a scorer returned, made sure of: a finite number, and plain values beside it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Verdict:
    score: float
    extras: dict[str, Any] = field(default_factory=dict)
    """Every key of a dict that was returned, `score` included; empty for a plain number."""


def verdict_of(value: Any) -> Verdict:
    """Understand a number (bool and numpy scalars too) or a dict with `score`; anything else raises ValueError.

    >>> verdict_of({"score": True, "format": 0.5})
    Verdict(score=1.0, extras={'score': 1.0, 'format': 0.5})
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(f"The scorer returned a dict without 'score', only {', '.join(map(str, value)) or 'nothing'}.")
        score = _finite(value["score"])
        return Verdict(score, {**{str(name): plain(item) for name, item in value.items()}, "score": score})
    return Verdict(_finite(value))


def plain(value: Any) -> Any:
    """A numpy or torch scalar as a Python number, an array as lists, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def _finite(value: Any) -> float:
    number = plain(value)
    if isinstance(number, list) and len(number) == 1 and number is not value:
        number = number[0]  # an array or tensor of one element
    if not isinstance(number, numbers.Real):
        raise ValueError(
            f"The scorer returned {_shown(value)} of type {type(value).__name__}; a number or a dict with 'score' is needed."
        )
    if not math.isfinite(number):
        raise ValueError(f"The scorer returned {float(number)}, which is not a finite number.")
    return float(number)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
