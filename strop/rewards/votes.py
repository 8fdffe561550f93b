"""What a response votes for when the majority of several decides: its final answer, spelled in one way."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from strop.rewards.dispatch import scorer_for
from strop.rewards.rules import gsm8k, math_boxed, multiple_choice, search_qa
from strop.rewards.rules.math_dapo import INVALID
from strop.rewards.rules.numbers import to_number


def vote_of(data_source: str, text: str, extras: Mapping[str, Any]) -> str | None:
    """The answer that the scorer found (`pred`), else the one that the rule of the data source reads; None abstains."""
    if "pred" in extras:
        pred = extras["pred"]
        return None if pred is None or pred in ("", INVALID) else str(pred)
    read = _reader(data_source)
    return None if read is None else read(text)


def can_vote(data_source: str, extras: Mapping[str, Any]) -> bool:
    return "pred" in extras or _reader(data_source) is not None


def number(text: str) -> str | None:
    """GSM8K's number after four hashes; 42, 42. and 42.00 are one vote.

    >>> number("so #### 1,200.50") == number("#### 1200.5")
    True
    """
    answer = gsm8k.extract_answer(text)
    value = None if answer is None else to_number(answer)
    return answer if value is None else format(value.normalize(), "f")


def boxed(text: str) -> str | None:
    """MATH's last box, with LaTeX normalised."""
    answer = math_boxed.extract_answer(text)
    return None if answer is None else math_boxed.normalise(answer)


def letter(text: str) -> str | None:
    return multiple_choice.extract_choice(text)


def tagged(text: str) -> str | None:
    answer = search_qa.extract_answer(text)
    return None if answer is None else search_qa.normalise(answer)


@functools.lru_cache(maxsize=256)
def _reader(data_source: str) -> Callable[[str], str | None] | None:
    try:
        path = scorer_for(data_source).facts["vote"]
    except ValueError:  # a source that only the user's own function knows
        return None
    if path is None:
        return None
    module, _, attribute = path.partition(":")
    reader: Callable[[str], str | None] = getattr(importlib.import_module(module), attribute)
    return reader
