"""`Scorer` fills in the scores of trajectories: it calls a reward manager, retries, shapes and counts.

A failure is never a silent zero. A sample whose scorer raises, times out or returns something unusable keeps
`score=None`, which masks it, and is counted. If every sample fails, the scorer itself is broken
(`BrokenScorer`).
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from strop.errors import CRASHED, REFUSED
from strop.rewards.base import RewardSample, Verdict, build_samples, parse_verdict
from strop.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Outcome = Verdict | Exception


class RewardManager(Protocol):
    """Anything that scores samples: a reward manager, a reward model, a judge, a reward server."""

    def score(self, samples: Sequence[RewardSample]) -> Sequence[object]:
        """Return for every sample a number, a dict with `score`, or an exception."""
        ...


@dataclass(frozen=True)
class ScoreReport:
    """Counters of one scoring round; `metrics` holds them too, with the mean of every reported number."""

    samples: int
    failed: int
    timed_out: int
    """How many of the failed ones timed out."""
    retried: int
    seconds: float
    metrics: dict[str, float]


def merge_score_metrics(
    reports: Sequence[ScoreReport], elapsed: Callable[[Iterable[float]], float]
) -> dict[str, float]:
    """One set of metrics from several calls of a scorer: counts add up, means are weighted by samples.
    `elapsed` is `sum` for calls one after the other, `max` for calls at the same time."""
    metrics: dict[str, float] = {}
    names: dict[str, None] = {}
    for report in reports:
        names.update(dict.fromkeys(report.metrics))
    for name in names:
        having = [report for report in reports if name in report.metrics]
        values = [report.metrics[name] for report in having]
        if name.endswith("/mean"):
            scored = [report.samples - report.failed for report in having]
            metrics[name] = sum(value * weight for value, weight in zip(values, scored)) / max(1, sum(scored))
        elif name.endswith("/seconds"):
            metrics[name] = elapsed(values)
        else:
            metrics[name] = sum(values)
    return metrics


class BrokenScorer(ValueError):
    """No sample could be scored. With several ranks this may hold for one of them only; see `report`."""

    report: ScoreReport
    exit_code: int = REFUSED


class Scorer:
    """Scores trajectories with a reward model, a reward manager, or both, one after the other."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        manager: RewardManager | None = None,
        model: RewardManager | None = None,
        shaping: Shaping | None = None,
        retries: int = 0,
        stores_acc: bool = False,
        whole_transcript: bool = False,
    ):
        """With both, `model` scores first and the function of `manager` reads extra_info["rm_score"]; the
        score of `manager` counts. `stores_acc`: a plain number is also reported as `acc`.
        """
        assert manager is not None or model is not None
        self.tokenizer = tokenizer
        self.manager = manager
        self.model = model
        self.shaping = shaping or Shaping()
        self.retries = retries
        self.stores_acc = stores_acc
        self.whole_transcript = whole_transcript

    def score(self, trajectories: Sequence[Trajectory]) -> ScoreReport:
        """Set `score` and `extras` of each trajectory; one that its environment scored keeps its score."""
        start = time.perf_counter()
        unscored = [t for t in trajectories if t.score is None]
        samples = build_samples(unscored, self.tokenizer, whole_transcript=self.whole_transcript)
        before = dict(self._usage())
        outcomes, retried = self._evaluate(samples)
        try:
            _check_failures(samples, outcomes)
        except BrokenScorer as problem:
            problem.report = self._report(outcomes, retried, start, before)
            raise
        self._store(samples, outcomes)
        return self._report(outcomes, retried, start, before)

    def _report(
        self, outcomes: Sequence[Outcome], retried: int, start: float, before: Mapping[str, float]
    ) -> ScoreReport:
        """The report of a round that began at `start`, when a judge had counted `before`."""
        report = _build_report(outcomes, retried, time.perf_counter() - start)
        for name, value in self._usage().items():
            report.metrics[f"reward/{name}"] = float(value - before[name])
        return report

    def _usage(self) -> Mapping[str, float]:
        """What a judge has counted so far: requests, tokens, cost. Empty for other scorers."""
        usage: Mapping[str, float] = getattr(self.model, "usage", {})
        return usage

    def close(self) -> None:
        """Stop worker processes and close connections."""
        for part in (self.model, self.manager, getattr(self.manager, "function", None)):
            close = getattr(part, "close", None)
            if close is not None:
                close()

    def _evaluate(self, samples: Sequence[RewardSample]) -> tuple[list[Outcome], int]:
        """Return the outcome of each sample, and the number of retries."""
        if self.model is None:
            assert self.manager is not None
            return self._score_with_retries(self.manager, samples)
        outcomes, retried = self._score_with_retries(self.model, samples)
        if self.manager is None:
            return outcomes, retried
        model_verdicts: dict[int, Verdict] = {}
        with_rm_score: list[RewardSample] = []
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, Verdict):
                model_verdicts[index] = outcome
                extra_info = {**samples[index].extra_info, "rm_score": outcome.score}
                with_rm_score.append(replace(samples[index], extra_info=extra_info))
        answers, retried_again = self._score_with_retries(self.manager, with_rm_score)
        for (index, model_verdict), answer in zip(model_verdicts.items(), answers, strict=True):
            if isinstance(answer, Verdict):
                answer = Verdict(answer.score, {"rm_score": model_verdict.score, **answer.extras})
            outcomes[index] = answer
        return outcomes, retried + retried_again

    def _score_with_retries(
        self, manager: RewardManager, samples: Sequence[RewardSample]
    ) -> tuple[list[Outcome], int]:
        """Return the outcome of each sample, and how many calls (or requests of the manager) were
        repeated."""
        requests_before: int = getattr(manager, "retried", 0)
        outcomes = _score_once(manager, samples)
        retried = 0
        for _ in range(self.retries):
            failed = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Exception)]
            if not failed:
                break
            retried += len(failed)
            second_try = _score_once(manager, [samples[index] for index in failed])
            for index, outcome in zip(failed, second_try, strict=True):
                outcomes[index] = outcome
        return outcomes, retried + getattr(manager, "retried", 0) - requests_before

    def _store(self, samples: Sequence[RewardSample], outcomes: Sequence[Outcome]) -> None:
        """Write shaped scores and extras to the trajectories of the samples that did not fail."""
        trajectories: list[Trajectory] = []
        verdicts: list[Verdict] = []
        for sample, outcome in zip(samples, outcomes):
            if isinstance(outcome, Verdict):
                trajectories.append(sample.trajectory)
                verdicts.append(outcome)
        shaped, reports = self.shaping.apply([verdict.score for verdict in verdicts], trajectories)
        for trajectory, verdict, score, report in zip(trajectories, verdicts, shaped, reports, strict=True):
            if self.stores_acc:
                verdict.extras.setdefault("acc", verdict.score)
            verdict.extras.update(report)
            trajectory.score = score
            trajectory.unpenalized = self.shaping.clipped(verdict.score)
            trajectory.extras.update(verdict.extras)


def _score_once(manager: RewardManager, samples: Sequence[RewardSample]) -> list[Outcome]:
    if not samples:
        return []
    try:
        values = list(manager.score(samples))
        if len(values) != len(samples):
            raise ValueError(
                f"The reward manager {type(manager).__name__} was given {len(samples)} samples and returned "
                f"{len(values)} values."
            )
    except Exception as error:  # noqa: BLE001 - a manager may be the user's: it failed for all its samples
        return [error] * len(samples)
    return [_outcome(value) for value in values]


def _outcome(value: object) -> Outcome:
    if isinstance(value, Exception):
        return value
    try:
        return parse_verdict(value)
    except ValueError as error:
        return error


def _check_failures(samples: Sequence[RewardSample], outcomes: Sequence[Outcome]) -> None:
    """Log the first failure of the step; raise BrokenScorer if every sample failed."""
    errors = list(_errors(samples, outcomes))
    if not errors:
        return
    sample, error = errors[0]
    where = f"row {sample.index} of {sample.data_source}"
    if len(errors) == len(samples):
        unreachable = all(isinstance(problem, ConnectionError | TimeoutError) for _, problem in errors)
        cause = "so the scorer itself must be broken"
        if unreachable:
            cause = "none of them within reward_model.timeout"
        broken = BrokenScorer(
            f"Scoring failed for all {len(samples)} samples, {cause}. The first, {where}: {_describe(error)}"
        )
        if unreachable:  # a restart may find the server again
            broken.exit_code = CRASHED
        raise broken from error
    logger.warning(
        "Scoring failed for %d of %d samples, which are masked. The first, %s: %s",
        len(errors),
        len(samples),
        where,
        _describe(error),
    )


def _errors(
    samples: Sequence[RewardSample], outcomes: Sequence[Outcome]
) -> Iterator[tuple[RewardSample, Exception]]:
    for sample, outcome in zip(samples, outcomes):
        if isinstance(outcome, Exception):
            yield sample, outcome


def _describe(error: Exception) -> str:
    """Return the message, the line that raised it, and advice for the most common mistake."""
    place = ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    hint = ""
    if "signal only works in main thread" in str(error):
        hint = (
            " Set reward_model.reward_manager=prime: it runs scorers in processes, where they may use "
            "signals."
        )
    return f"{type(error).__name__}: {error}{place}{hint}"


def _build_report(outcomes: Sequence[Outcome], retried: int, seconds: float) -> ScoreReport:
    failed = 0
    timed_out = 0
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            failed += 1
            timed_out += isinstance(outcome, TimeoutError)
            continue
        columns["score"].append(outcome.score)
        for name, value in outcome.extras.items():
            if name != "score" and isinstance(value, bool | int | float) and math.isfinite(value):
                columns[name].append(float(value))
    metrics = {f"reward/{name}/mean": sum(column) / len(column) for name, column in columns.items()}
    metrics["reward/failed"] = float(failed)
    metrics["reward/timed_out"] = float(timed_out)
    metrics["reward/retried"] = float(retried)
    metrics["reward/seconds"] = seconds
    return ScoreReport(len(outcomes), failed, timed_out, retried, seconds, metrics)


# --- Reward shaping -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shaping:
    """Changes to every score, in this order: overlong penalty, truncation penalty, clipping. All off by
    default."""

    overlong_buffer: int | None = None
    """DAPO's penalty grows over this many tokens before `max_response_length`."""
    overlong_factor: float = 1.0
    overlong_capped: bool = False
    """Beyond `max_response_length` the penalty stays at the factor, instead of growing."""
    max_response_length: int | None = None
    log_overlong: bool = False
    """Report `overlong_reward` and `overlong` of each sample."""
    truncated: float | None = None
    """For responses cut at the length limit: a value in [0, 1] multiplies the score, a negative one replaces
    it."""
    clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.overlong_buffer is not None:
            if self.max_response_length is None:
                raise ValueError(
                    "reward_model.overlong_buffer.enable=true needs the longest response: set "
                    "reward_model.reward_kwargs.max_resp_len, or data.max_response_length."
                )
            if not 0 < self.overlong_buffer <= self.max_response_length:
                raise ValueError(
                    f"reward_model.overlong_buffer.len={self.overlong_buffer} must lie between 1 and the "
                    f"longest response, {self.max_response_length} tokens."
                )
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(
                f"reward_model.clip_range must be [low, high] with low < high, it is {list(self.clip)}."
            )

    def clipped(self, score: float) -> float:
        """A score without penalties for the length of its response."""
        return score if self.clip is None else min(max(score, self.clip[0]), self.clip[1])

    def apply(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> tuple[list[float], list[dict[str, object]]]:
        """Return the shaped scores, and the extra values to report for each of them."""
        reports: list[dict[str, object]] = [{} for _ in scores]
        if not scores or (self.overlong_buffer is None and self.truncated is None and self.clip is None):
            return list(scores), reports
        import torch

        from strop.algorithms.reward_shaping import overlong_penalty, truncation_penalty

        shaped = torch.tensor(scores, dtype=torch.float64)
        if self.overlong_buffer is not None:
            assert self.max_response_length is not None
            lengths = torch.tensor([len(t.response) for t in trajectories], dtype=torch.float64)
            penalty = overlong_penalty(
                lengths,
                max_length=self.max_response_length,
                buffer=self.overlong_buffer,
                factor=self.overlong_factor,
                capped=self.overlong_capped,
            )
            shaped = shaped + penalty
            if self.log_overlong:
                reports = [{"overlong_reward": value, "overlong": value < 0} for value in penalty.tolist()]
        if self.truncated is not None:
            hit_length_limit = torch.tensor([t.finish == "length" for t in trajectories])
            shaped = truncation_penalty(shaped, hit_length_limit, coef=self.truncated)
        if self.clip is not None:
            shaped = shaped.clamp(*self.clip)
        return shaped.tolist(), reports
