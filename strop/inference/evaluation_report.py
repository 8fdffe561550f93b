"""The reports of `strop eval`: tables on the terminal and JSON files.

`compare` matches the prompts of two files and finds those that one file answers right and the other wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter

from rich.console import Console
from rich.table import Table

from strop.algorithms.metrics.validation import Estimate, bootstrap_mean, sign_test
from strop.config.schema.inference import EvaluationSettingsConfig
from strop.inference.evaluation import ScoredPrompt, SourceResult, has_binary_scores


@dataclass(frozen=True)
class Flip:
    """A prompt that one file answers right and the other wrong (or, without right and wrong, scores
    differently)."""

    prompt: ScoredPrompt
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


def compare(
    before: Sequence[ScoredPrompt], after: Sequence[ScoredPrompt], settings: EvaluationSettingsConfig
) -> dict[str, Comparison]:
    """The comparison per data source. Prompts are matched by their text; repeated prompts by their order."""
    first = _by_identity(before)
    second = _by_identity(after)
    shared = [identity for identity in first if identity in second]
    if not shared:
        raise ValueError("The two files have no prompt in common. Were they generated from the same data?")
    pairs: dict[str, list[tuple[ScoredPrompt, ScoredPrompt]]] = {}
    for identity in shared:
        prompt = first[identity]
        pairs.setdefault(prompt.source, []).append((prompt, second[identity]))
    only_before = _count_missing(first, second)
    only_after = _count_missing(second, first)
    found: dict[str, Comparison] = {}
    for source, source_pairs in pairs.items():
        comparison = _compare(source_pairs, settings, only_before[source], only_after[source])
        if comparison is not None:
            found[source] = comparison
    return found


def _count_missing(prompts: Mapping[str, ScoredPrompt], other: Mapping[str, ScoredPrompt]) -> Counter[str]:
    """Per data source, the number of prompts that `other` does not have."""
    missing: Counter[str] = Counter()
    for identity, prompt in prompts.items():
        if identity not in other:
            missing[prompt.source] += 1
    return missing


def _compare(
    pairs: list[tuple[ScoredPrompt, ScoredPrompt]],
    settings: EvaluationSettingsConfig,
    only_before: int,
    only_after: int,
) -> Comparison | None:
    """The comparison of the pairs in which both prompts have a score; None: there is no such pair."""
    scored = [(first, second) for first, second in pairs if first.scored and second.scored]
    if not scored:
        return None
    binary = has_binary_scores([*map(itemgetter(0), scored), *map(itemgetter(1), scored)])
    before_values: list[float] = []
    after_values: list[float] = []
    differences: list[float] = []
    flips: list[Flip] = []
    for first, second in scored:
        before = _value(first, binary)
        after = _value(second, binary)
        before_values.append(before)
        after_values.append(after)
        differences.append(after - before)
        if _is_flip(before, after, binary):
            flips.append(Flip(second, before, after))
    gained = sum(flip.gained for flip in flips)

    def estimate(numbers: list[float]) -> Estimate:
        return bootstrap_mean(
            numbers, draws=settings.bootstrap, confidence=settings.confidence, seed=settings.seed
        )

    return Comparison(
        prompts=len(scored),
        measure="acc" if binary else "score",
        before=estimate(before_values),
        after=estimate(after_values),
        difference=estimate(differences),
        flips=flips,
        p_value=sign_test(gained, len(flips) - gained),
        only_before=only_before,
        only_after=only_after,
    )


def _is_flip(before: float, after: float, binary: bool) -> bool:
    if binary:
        return (before > 0.5) != (after > 0.5)
    return before != after


def _value(prompt: ScoredPrompt, binary: bool) -> float:
    """The accuracy of a prompt if there is one, otherwise its mean score."""
    numbers = prompt.correctness() if binary else prompt.scored
    return sum(numbers) / len(numbers)


def _by_identity(scored_prompts: Sequence[ScoredPrompt]) -> dict[str, ScoredPrompt]:
    """Prompts by data source, text, ground truth, and the number of the repetition."""
    repetitions: Counter[str] = Counter()
    found: dict[str, ScoredPrompt] = {}
    for prompt in scored_prompts:
        content: object = [prompt.prompt, prompt.truth]
        if prompt.prompt is None:
            content = prompt.row
        identity = json.dumps([prompt.source, content], sort_keys=True, default=str)
        repetitions[identity] += 1
        found[f"{identity} #{repetitions[identity]}"] = prompt
    return found


# Reports: tables on the terminal, JSON on disk.


SHOWN_FLIPS = 5
SHOWN_CHARACTERS = 80


def show_results(
    results: Mapping[str, SourceResult], *, confidence: float, console: Console | None = None
) -> None:
    """Print the table of an evaluation and the responses that could not be scored."""
    console = console or Console()
    table = Table()
    table.add_column("data source", overflow="fold")
    for title in ("metric", "mean", f"{confidence:.0%} interval", "prompts", "responses", "failed"):
        table.add_column(title, justify="right")
    for source, result in results.items():
        # Only the first row of a data source shows its name and its counts.
        label = source
        counts = [str(result.responses), _failures(result)]
        if not result.metrics:
            table.add_row(label, "–", "–", "", "0", *counts)
        for name, estimate in result.metrics.items():
            mean, interval = _mean_and_interval(estimate)
            table.add_row(label, name, mean, interval, str(estimate.prompts), *counts)
            label = ""
            counts = ["", ""]
        table.add_section()
    console.print(table)
    for source, result in results.items():
        if result.failed:
            console.print(
                f"{source}: {result.failed} of {result.responses} responses could not be scored and are in "
                f"no mean ({result.timed_out} took too long). The first: {result.first_error}",
                markup=False,
                highlight=False,
            )
        if result.unanswered:
            console.print(
                f"{source}: {result.unanswered} prompts have no response and are in no mean.", markup=False
            )


def show_comparison(
    found: Mapping[str, Comparison], *, confidence: float, console: Console | None = None
) -> None:
    """Print the table of a comparison and the prompts that flipped."""
    console = console or Console()
    table = Table()
    table.add_column("data source", overflow="fold")
    for title in ("measure", "", "mean", f"{confidence:.0%} interval", "prompts"):
        table.add_column(title, justify="right")
    for source, comparison in found.items():
        label = [source, comparison.measure]
        for title in ("before", "after", "difference"):
            mean, interval = _mean_and_interval(getattr(comparison, title), sign=title == "difference")
            table.add_row(*label, title, mean, interval, str(comparison.prompts))
            label = ["", ""]
        table.add_section()
    console.print(table)
    for source, comparison in found.items():
        for line in _flip_lines(source, comparison):
            console.print(line, markup=False, highlight=False)


def _flip_lines(source: str, comparison: Comparison) -> Iterator[str]:
    gained = len(comparison.gained)
    lost = len(comparison.lost)
    chance = f"{comparison.p_value:.3f}"
    if comparison.p_value < 0.001:
        chance = "below 0.001"
    yield (
        f"{source}: {gained} prompts gained, {lost} lost; the chance of that, were both equally good, is "
        f"{chance}."
    )
    for title, flips in (("gained", comparison.gained), ("lost", comparison.lost)):
        for flip in flips[:SHOWN_FLIPS]:
            change = f"{flip.before:.2f} -> {flip.after:.2f}"
            yield f"  {title}: row {flip.prompt.row}, {change}  {prompt_text(flip)}"
        if len(flips) > SHOWN_FLIPS:
            yield f"  {title}: and {len(flips) - SHOWN_FLIPS} more"
    left_out = comparison.only_before + comparison.only_after
    if left_out:
        yield f"  {left_out} prompts are in one file only and left out."


def prompt_text(flip: Flip) -> str:
    """The last message of the prompt on one line, shortened."""
    prompt = flip.prompt.prompt
    text = str(prompt or "")
    if isinstance(prompt, list) and prompt:
        text = str(prompt[-1].get("content", ""))
    line = " ".join(text.split())
    if len(line) <= SHOWN_CHARACTERS:
        return line
    return line[: SHOWN_CHARACTERS - 3] + "..."


def _mean_and_interval(estimate: Estimate, *, sign: bool = False) -> tuple[str, str]:
    """The two table cells of an estimate."""
    mean, _, interval = shown(estimate, sign=sign).partition(" [")
    return mean, interval.rstrip("]")


def shown(estimate: Estimate | None, *, sign: bool = False) -> str:
    """A mean and its interval.

    >>> shown(Estimate(0.5, 0.25, 0.75)), shown(Estimate(0.5)), shown(None)
    ('0.500 [0.250, 0.750]', '0.500', '–')
    """
    if estimate is None:
        return "–"
    mean = f"{estimate.mean:+.3f}" if sign else f"{estimate.mean:.3f}"
    if estimate.low is None:
        return mean
    return f"{mean} [{estimate.low:.3f}, {estimate.high:.3f}]"


def results_as_json(
    results: Mapping[str, SourceResult], scored_prompts: Sequence[ScoredPrompt]
) -> dict[str, object]:
    """`test_score` holds what verl's evaluation prints: the mean score per data source."""
    test_score: dict[str, float] = {}
    sources: dict[str, dict[str, object]] = {}
    for source, result in results.items():
        if "score" in result.metrics:
            test_score[source] = result.metrics["score"].mean
        metrics = {name: estimate._asdict() for name, estimate in result.metrics.items()}
        sources[source] = {**asdict(result), "metrics": metrics}
    prompts: list[dict[str, object]] = []
    for prompt in scored_prompts:
        prompts.append(
            {
                "row": prompt.row,
                "data_source": prompt.source,
                "scores": prompt.scores,
                "correct": prompt.correct,
                "errors": prompt.errors,
            }
        )
    return {"test_score": test_score, "sources": sources, "prompts": prompts}


def comparison_as_json(found: Mapping[str, Comparison]) -> dict[str, object]:
    """The comparison of each data source as JSON values."""
    sources: dict[str, object] = {}
    for source, comparison in found.items():
        sources[source] = {
            "prompts": comparison.prompts,
            "measure": comparison.measure,
            "p_value": comparison.p_value,
            "only_before": comparison.only_before,
            "only_after": comparison.only_after,
            "before": comparison.before._asdict(),
            "after": comparison.after._asdict(),
            "difference": comparison.difference._asdict(),
            "gained": [_flip_as_json(flip) for flip in comparison.gained],
            "lost": [_flip_as_json(flip) for flip in comparison.lost],
        }
    return sources


def _flip_as_json(flip: Flip) -> dict[str, object]:
    return {
        "row": flip.prompt.row,
        "prompt": flip.prompt.prompt,
        "before": flip.before,
        "after": flip.after,
    }


def _failures(result: SourceResult) -> str:
    if not result.timed_out:
        return str(result.failed)
    return f"{result.failed} ({result.timed_out} late)"
