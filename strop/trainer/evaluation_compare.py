"""Two files of answers to the same prompts: which prompts flipped, and whether the difference is more than chance."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strop.algorithms.metrics.uncertainty import Estimate, bootstrap_mean, sign_test
from strop.config.schema.inference import EvaluationSettings
from strop.trainer.evaluation import Judged, says_right_or_wrong


@dataclass(frozen=True)
class Flip:
    """A prompt that one file answers right and the other wrong (or, without right and wrong, scores differently)."""

    prompt: Judged
    before: float
    after: float
    """Share of right responses, or mean score, in the first and the second file."""

    @property
    def gained(self) -> bool:
        return self.after > self.before


@dataclass(frozen=True)
class Comparison:
    """One data source in both files."""

    prompts: int
    measure: str
    """acc or score."""
    before: Estimate
    after: Estimate
    difference: Estimate
    """After minus before, prompt by prompt."""
    flips: list[Flip]
    p_value: float
    """Chance of so uneven flips if both were equally good."""
    only_before: int
    """Prompts that only the first file has; they are left out."""
    only_after: int
    """The same of the second file."""

    @property
    def gained(self) -> list[Flip]:
        return [flip for flip in self.flips if flip.gained]

    @property
    def lost(self) -> list[Flip]:
        return [flip for flip in self.flips if not flip.gained]


def compare(before: Sequence[Judged], after: Sequence[Judged], settings: EvaluationSettings) -> dict[str, Comparison]:
    """Per data source. Prompts are matched by what they say; repeated ones in their order."""
    first, second = _by_identity(before), _by_identity(after)
    shared = [identity for identity in first if identity in second]
    if not shared:
        raise ValueError("The two files have no prompt in common. Were they generated from the same data?")
    found = {}
    for source in dict.fromkeys(first[identity].source for identity in shared):
        pairs = [(first[i], second[i]) for i in shared if first[i].source == source]
        missing = [
            sum(prompt.source == source for i, prompt in these.items() if i not in those)
            for these, those in ((first, second), (second, first))
        ]
        comparison = _compare(pairs, settings, *missing)
        if comparison is not None:
            found[source] = comparison
    return found


def _compare(
    pairs: list[tuple[Judged, Judged]], settings: EvaluationSettings, only_before: int, only_after: int
) -> Comparison | None:
    scored = [pair for pair in pairs if all(prompt.scored for prompt in pair)]
    if not scored:
        return None
    binary = says_right_or_wrong([prompt for pair in scored for prompt in pair])
    values = [(_value(a, binary), _value(b, binary)) for a, b in scored]
    flips = [
        Flip(b, before, after)
        for (_, b), (before, after) in zip(scored, values)
        if ((before > 0.5) != (after > 0.5) if binary else before != after)
    ]
    gained = sum(flip.gained for flip in flips)

    def estimate(numbers: list[float]) -> Estimate:
        return bootstrap_mean(numbers, draws=settings.bootstrap, confidence=settings.confidence, seed=settings.seed)

    return Comparison(
        prompts=len(scored),
        measure="acc" if binary else "score",
        before=estimate([before for before, _ in values]),
        after=estimate([after for _, after in values]),
        difference=estimate([after - before for before, after in values]),
        flips=flips,
        p_value=sign_test(gained, len(flips) - gained),
        only_before=only_before,
        only_after=only_after,
    )


def _value(prompt: Judged, binary: bool) -> float:
    numbers = [right for right, _ in prompt.told()] if binary else prompt.scored
    return sum(numbers) / len(numbers)


def _by_identity(judged: Sequence[Judged]) -> dict[str, Judged]:
    seen: Counter[str] = Counter()
    found = {}
    for prompt in judged:
        what = prompt.row if prompt.prompt is None else [prompt.prompt, prompt.truth]
        identity = json.dumps([prompt.source, what], sort_keys=True, default=str)
        seen[identity] += 1
        found[f"{identity} #{seen[identity]}"] = prompt
    return found
