"""Majority voting: the final answer of a response, normalised so that equal answers are equal texts."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping

from strop.rewards.function import find_scorer
from strop.rewards.rules import gsm8k, math_boxed, multiple_choice, search_qa
from strop.rewards.rules.math_dapo import INVALID
from strop.rewards.rules.maths import equality


def vote_of(data_source: str, text: str, extras: Mapping[str, object]) -> str | None:
    """Return the answer that the scorer found (`pred`), else the one that the rule extracts; None: no
    vote."""
    if "pred" in extras:
        pred = extras["pred"]
        if pred is None or pred in ("", INVALID):
            return None
        return str(pred)
    extract = _extractor(data_source)
    if extract is None:
        return None
    return extract(text)


def can_vote(data_source: str, extras: Mapping[str, object]) -> bool:
    """Whether responses of the data source have an answer to vote with."""
    return "pred" in extras or _extractor(data_source) is not None


def number(text: str) -> str | None:
    """GSM8K's number after four hashes; 42, 42. and 42.00 are one vote.

    >>> number("so #### 1,200.50") == number("#### 1200.5")
    True
    """
    return _canonical(gsm8k.extract_answer(text))


def boxed(text: str) -> str | None:
    """MATH's last box; equal numbers are one vote, as 0.5 and \\frac{1}{2}."""
    return _canonical(math_boxed.extract_answer(text))


def _canonical(answer: str | None) -> str | None:
    if answer is None:
        return None
    return equality.canonical(answer)


def letter(text: str) -> str | None:
    """The letter of a multiple-choice answer."""
    return multiple_choice.extract_choice(text)


def tagged(text: str) -> str | None:
    """The text in the last <answer> tag, normalised."""
    answer = search_qa.extract_answer(text)
    if answer is None:
        return None
    return search_qa.normalise(answer)


@functools.lru_cache(maxsize=256)
def _extractor(data_source: str) -> Callable[[str], str | None] | None:
    """Return the function that extracts the answer of a response, declared as `vote` of the rule scorer."""
    try:
        path = find_scorer(data_source).facts["vote"]
    except ValueError:  # a data source that only the user's function knows
        return None
    if path is None:
        return None
    module, _, attribute = path.partition(":")
    extract: Callable[[str], str | None] = getattr(importlib.import_module(module), attribute)
    return extract
