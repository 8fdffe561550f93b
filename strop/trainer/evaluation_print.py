"""Results of an evaluation: tables on the terminal, JSON on the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from strop.algorithms.metrics.uncertainty import Estimate
from strop.trainer.evaluation import Judged, SourceResult
from strop.trainer.evaluation_compare import Comparison, Flip

SHOWN_FLIPS = 5
SHOWN_CHARACTERS = 80


def show_results(results: Mapping[str, SourceResult], *, confidence: float, console: Console | None = None) -> None:
    console = console or Console()
    table = Table()
    table.add_column("data source", overflow="fold")
    for title in ("metric", "mean", f"{confidence:.0%} interval", "prompts", "responses", "failed"):
        table.add_column(title, justify="right")
    for source, result in results.items():
        facts = (str(result.responses), _failures(result))
        for number, (name, found) in enumerate(result.metrics.items() or [("–", None)]):
            mean, interval = shown(found).partition(" [")[::2]
            first = number == 0
            prompts = str(found.prompts) if found else "0"
            table.add_row(source if first else "", name, mean, interval.rstrip("]"), prompts, *(facts if first else ("", "")))
        table.add_section()
    console.print(table)
    for source, result in results.items():
        if result.failed:
            console.print(
                f"{source}: {result.failed} of {result.responses} responses could not be scored and are in no mean "
                f"({result.timed_out} took too long). The first: {result.first_error}",
                markup=False,
                highlight=False,
            )
        if result.unanswered:
            console.print(f"{source}: {result.unanswered} prompts have no response and are in no mean.", markup=False)


def show_comparison(found: Mapping[str, Comparison], *, confidence: float, console: Console | None = None) -> None:
    console = console or Console()
    table = Table()
    table.add_column("data source", overflow="fold")
    for title in ("measure", "", "mean", f"{confidence:.0%} interval", "prompts"):
        table.add_column(title, justify="right")
    for source, comparison in found.items():
        facts = (source, comparison.measure)
        for title in ("before", "after", "difference"):
            mean, interval = shown(getattr(comparison, title), sign=title == "difference").partition(" [")[::2]
            table.add_row(*facts, title, mean, interval.rstrip("]"), str(comparison.prompts))
            facts = ("", "")
        table.add_section()
    console.print(table)
    for source, comparison in found.items():
        for line in _flipped(source, comparison):
            console.print(line, markup=False, highlight=False)


def _flipped(source: str, comparison: Comparison) -> Iterator[str]:
    gained, lost = len(comparison.gained), len(comparison.lost)
    chance = "below 0.001" if comparison.p_value < 0.001 else f"{comparison.p_value:.3f}"
    yield f"{source}: {gained} prompts gained, {lost} lost; the chance of that, were both equally good, is {chance}."
    for title, flips in (("gained", comparison.gained), ("lost", comparison.lost)):
        for flip in flips[:SHOWN_FLIPS]:
            yield f"  {title}: row {flip.prompt.row}, {flip.before:.2f} -> {flip.after:.2f}  {prompt_text(flip)}"
        if len(flips) > SHOWN_FLIPS:
            yield f"  {title}: and {len(flips) - SHOWN_FLIPS} more"
    left_out = comparison.only_before + comparison.only_after
    if left_out:
        yield f"  {left_out} prompts are in one file only and left out."


def prompt_text(flip: Flip) -> str:
    prompt = flip.prompt.prompt
    text = str(prompt[-1].get("content", "") if isinstance(prompt, list) and prompt else prompt or "")
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "..."


def shown(estimate: Estimate | None, *, sign: bool = False) -> str:
    """A mean and its interval.

    >>> shown(Estimate(0.5, 0.25, 0.75)), shown(Estimate(0.5)), shown(None)
    ('0.500 [0.250, 0.750]', '0.500', '–')
    """
    if estimate is None:
        return "–"
    mean = f"{estimate.mean:+.3f}" if sign else f"{estimate.mean:.3f}"
    return mean if estimate.low is None else f"{mean} [{estimate.low:.3f}, {estimate.high:.3f}]"


def results_as_json(results: Mapping[str, SourceResult], judged: Sequence[Judged]) -> dict[str, Any]:
    """`test_score` holds what verl's evaluation prints: the mean score per data source."""
    return {
        "test_score": {s: r.metrics["score"].mean for s, r in results.items() if "score" in r.metrics},
        "sources": {
            source: {**asdict(result), "metrics": {name: _estimate(e) for name, e in result.metrics.items()}}
            for source, result in results.items()
        },
        "prompts": [
            {"row": p.row, "data_source": p.source, "scores": p.scores, "correct": p.correct, "errors": p.errors}
            for p in judged
        ],
    }


def comparison_as_json(found: Mapping[str, Comparison]) -> dict[str, Any]:
    return {
        source: {
            **{name: getattr(c, name) for name in ("prompts", "measure", "p_value", "only_before", "only_after")},
            **{name: _estimate(getattr(c, name)) for name in ("before", "after", "difference")},
            **{
                title: [{"row": f.prompt.row, "prompt": f.prompt.prompt, "before": f.before, "after": f.after} for f in flips]
                for title, flips in (("gained", c.gained), ("lost", c.lost))
            },
        }
        for source, c in found.items()
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return estimate._asdict()


def _failures(result: SourceResult) -> str:
    return str(result.failed) if not result.timed_out else f"{result.failed} ({result.timed_out} late)"
