"""Pairs of answers and references with a mathematician's verdict, and how often a scorer agrees with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent


class Probe(NamedTuple):
    kind: str
    right: bool
    answer: str
    truth: str


class Tally(NamedTuple):
    """Shares of all probes, in percent, and the probes that the scorer judges wrongly."""

    agree: float
    false_positive: float
    false_negative: float
    wrong: list[Probe]

    def __str__(self) -> str:
        return f"{self.agree:.1f}/{self.false_positive:.1f}/{self.false_negative:.1f}"


def probes(file: str) -> Iterator[Probe]:
    """Yield the probes of `answers` or `gsm8k`."""
    kind = ""
    for line in (FOLDER / f"{file}.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("# class: "):
            kind = line.removeprefix("# class: ")
        elif not line.startswith("#"):
            verdict, answer, truth = line.split("\t")
            yield Probe(kind, verdict == "=", answer, truth)


def tally(cases: list[Probe], accepts: Callable[[str, str], bool]) -> Tally:
    """Compare `accepts(answer, truth)` with the verdicts."""
    wrong = []
    for case in cases:
        if accepts(case.answer, case.truth) != case.right:
            wrong.append(case)
    missed = [case for case in wrong if case.right]
    share = 100.0 / len(cases)
    return Tally(100.0 - share * len(wrong), share * (len(wrong) - len(missed)), share * len(missed), wrong)
