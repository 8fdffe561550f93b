"""Sampling and scoring divided over ranks: whole prompts are dealt, every rank is told everything, in the order of one rank."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from strop.data.balance import balanced_partitions
from strop.ranks import Ranks, SharedFailure
from strop.rewards.scorer import BrokenScorer
from strop.trainer.parcel import Parcel
from strop.types import Prompt, Trajectory


def deal_prompts(prompts: Sequence[Prompt], ranks: Ranks, team: int = 1) -> list[list[int]]:
    """Places of the prompts that each team of ranks answers: as many as the others, give or take one, and about as many
    tokens. The ranks of a `team` answer the same ones.

    A function of the prompts alone, so that a resumed run divides them alike.
    """
    if ranks.world == 1 or not prompts:
        return [list(range(len(prompts))) for _ in range(ranks.world // team)]
    ranks.agree("the prompts of this step (data.train_files)", _fingerprint(prompts))
    teams = ranks.world // team
    even = len(prompts) // teams * teams
    weights = [len(prompt.ids) for prompt in prompts[:even]]
    shares = balanced_partitions(weights, teams, equal_size=True) if even else [[] for _ in range(teams)]
    for number, place in enumerate(range(even, len(prompts))):
        shares[number].append(place)
    return shares


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    code = 0
    for prompt in prompts:
        code = zlib.crc32(array("q", [prompt.index, *prompt.ids]), code)
    return f"rows {[prompt.index for prompt in prompts[:4]]}... (checksum {code:08x})"


def told_to_all(made: list[Trajectory], prompts: Mapping[int, Prompt], ranks: Ranks, team: int = 1) -> list[Trajectory]:
    """The trajectories of all ranks, by prompt; one rank speaks for its `team`. Prompts, which may have images, are known
    everywhere and do not travel."""
    if ranks.world == 1:
        return made
    shares = ranks.gather(Parcel.of(made if ranks.rank % team == 0 else []))
    together = [t for share in shares for t in share.trajectories(prompts)]
    assert {t.group for t in together} == set(prompts), "every prompt is answered by some rank"
    return sorted(together, key=lambda t: t.group)


def score_in_shares(trajectories: Sequence[Trajectory], score: Callable[[Sequence[Trajectory]], Any], ranks: Ranks) -> Any:
    """Scores for all; samples of one prompt are scored by one rank, since some scorers compare them."""
    if ranks.world == 1:
        return score(trajectories)
    groups = {group: place for place, group in enumerate(dict.fromkeys(t.group for t in trajectories))}
    mine = [place for place, t in enumerate(trajectories) if groups[t.group] % ranks.world == ranks.rank]
    report, broken = ranks.together(lambda: _tried(score, [trajectories[place] for place in mine]), "scoring")
    found = {place: (trajectories[place].score, trajectories[place].turn_rewards, trajectories[place].extras) for place in mine}
    told = ranks.gather((found, report, broken))
    if all(reason is not None or not places for places, _, reason in told) and any(reason for _, _, reason in told):
        raise SharedFailure(next(reason for _, _, reason in told if reason))
    for places, _, _ in told:
        for place, (value, turns, extras) in places.items():
            t = trajectories[place]
            t.score, t.turn_rewards, t.extras = value, turns, extras
    return merged([part for _, part, _ in told])


def _tried(score: Callable[[Sequence[Trajectory]], Any], mine: Sequence[Trajectory]) -> tuple[Any, str | None]:
    """A rank whose few samples all fail is no proof that the scorer is broken; all ranks together are."""
    try:
        return score(mine), None
    except BrokenScorer as problem:
        return problem.report, str(problem)


def merged(reports: Sequence[Any]) -> Any:
    """One report of what several ranks did side by side."""
    return replace(
        reports[0],
        samples=sum(report.samples for report in reports),
        failed=sum(report.failed for report in reports),
        timed_out=sum(report.timed_out for report in reports),
        retried=sum(report.retried for report in reports),
        seconds=max(report.seconds for report in reports),
        metrics=merged_metrics(reports, max),
    )


def merged_metrics(reports: Sequence[Any], elapsed: Callable[[Iterable[float]], float]) -> dict[str, float]:
    """Counts add up, means weigh by samples; `elapsed` is `sum` of seconds one after the other, `max` side by side."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report.metrics):
        found = [(report.metrics[name], report.samples - report.failed) for report in reports if name in report.metrics]
        if name.endswith("/mean"):
            metrics[name] = sum(value * weight for value, weight in found) / max(1, sum(weight for _, weight in found))
        else:
            metrics[name] = (elapsed if name.endswith("/seconds") else sum)(value for value, _ in found)
    return metrics
