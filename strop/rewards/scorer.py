"""Scores for trajectories, from whatever the configuration names: rules, a function, a model, a server.

A failure is never a silent zero: a sample whose scorer raises, is late, or returns something unusable keeps `score=None`, which
masks it, and is counted. Only when every sample fails is the scorer itself taken to be broken.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from strop.rewards.sample import Sample, read_samples
from strop.rewards.shaping import Shaping
from strop.rewards.verdict import Verdict, verdict_of
from strop.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Manager(Protocol):
    def score(self, samples: Sequence[Sample]) -> Sequence[Any]:
        """For every sample a number, a dict with `score`, or an exception."""
        ...


@dataclass(frozen=True)
class ScoreReport:
    """How scoring went; `metrics` holds the same counters, and the mean of everything the scorers reported."""

    samples: int
    failed: int
    timed_out: int
    """Of the failed ones."""
    retried: int
    seconds: float
    metrics: dict[str, float]


class BrokenScorer(ValueError):
    """Not a single sample could be scored. With many ranks that may be so on one of them only: `report` counts the failures."""

    report: ScoreReport


class Scorer:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        manager: Manager | None = None,
        model: Manager | None = None,
        shaping: Shaping | None = None,
        retries: int = 0,
        stores_acc: bool = False,
        whole_transcript: bool = False,
    ):
        """`model` scores first; if there is a `manager` too, its function sees that score in extra_info["rm_score"] and has
        the last word. `stores_acc`: a scorer's plain number is also reported as `acc`.
        """
        assert manager is not None or model is not None
        self.tokenizer, self.manager, self.model = tokenizer, manager, model
        self.shaping = shaping or Shaping()
        self.retries, self.stores_acc, self.whole_transcript = retries, stores_acc, whole_transcript

    def score(self, trajectories: Sequence[Trajectory]) -> ScoreReport:
        """Fill in `score` and `extras`. A trajectory that has a score already, from its environment, keeps it."""
        start = time.perf_counter()
        fresh = [t for t in trajectories if t.score is None]
        samples = read_samples(fresh, self.tokenizer, whole_transcript=self.whole_transcript)
        results, retried = self._evaluate(samples)
        try:
            self._complain(samples, results)
        except BrokenScorer as problem:
            problem.report = _report(results, retried, time.perf_counter() - start)
            raise
        self._fill(samples, results)
        return _report(results, retried, time.perf_counter() - start)

    async def score_async(self, trajectories: Sequence[Trajectory]) -> ScoreReport:
        """The same, without holding up the event loop of the caller."""
        return await asyncio.to_thread(self.score, trajectories)

    def close(self) -> None:
        """End worker processes and connections."""
        for part in (self.model, self.manager, getattr(self.manager, "function", None)):
            close = getattr(part, "close", None)
            if close is not None:
                close()

    def _evaluate(self, samples: Sequence[Sample]) -> tuple[list[Verdict | Exception], int]:
        if self.model is None:
            assert self.manager is not None
            return self._ask(self.manager, samples)
        results, retried = self._ask(self.model, samples)
        if self.manager is None:
            return results, retried
        judged = [(place, found) for place, found in enumerate(results) if isinstance(found, Verdict)]
        informed = [
            replace(samples[place], extra_info={**samples[place].extra_info, "rm_score": found.score})
            for place, found in judged
        ]
        answers, more = self._ask(self.manager, informed)
        for (place, found), answer in zip(judged, answers, strict=True):
            if isinstance(answer, Verdict):
                answer = Verdict(answer.score, {"rm_score": found.score, **answer.extras})
            results[place] = answer
        return results, retried + more

    def _ask(self, manager: Manager, samples: Sequence[Sample]) -> tuple[list[Verdict | Exception], int]:
        """A verdict or an error for every sample, after retries; and how many calls were made again."""
        sent_before = getattr(manager, "retried", 0)
        results = _understand(manager, samples)
        retried = 0
        for _ in range(self.retries):
            again = [place for place, result in enumerate(results) if isinstance(result, Exception)]
            if not again:
                break
            retried += len(again)
            for place, result in zip(again, _understand(manager, [samples[place] for place in again]), strict=True):
                results[place] = result
        return results, retried + getattr(manager, "retried", 0) - sent_before

    def _complain(self, samples: Sequence[Sample], results: Sequence[Verdict | Exception]) -> None:
        """One line for the first failure of the step; an error when nothing but failures came."""
        failed = [(sample, result) for sample, result in zip(samples, results) if isinstance(result, Exception)]
        if not failed:
            return
        sample, error = failed[0]
        where = f"row {sample.index} of {sample.data_source}"
        if len(failed) == len(samples):
            raise BrokenScorer(
                f"Scoring failed for all {len(samples)} samples, so the scorer itself must be broken. The first, {where}: "
                f"{_described(error)}"
            ) from error
        logger.warning(
            "Scoring failed for %d of %d samples, which are masked. The first, %s: %s",
            len(failed),
            len(samples),
            where,
            _described(error),
        )

    def _fill(self, samples: Sequence[Sample], results: Sequence[Verdict | Exception]) -> None:
        scored = [(sample.trajectory, found) for sample, found in zip(samples, results) if isinstance(found, Verdict)]
        shaped, reports = self.shaping.apply([found.score for _, found in scored], [trajectory for trajectory, _ in scored])
        for (trajectory, found), score, report in zip(scored, shaped, reports, strict=True):
            if self.stores_acc:
                found.extras.setdefault("acc", found.score)
            found.extras.update(report)
            trajectory.score = score
            trajectory.extras.update(found.extras)


def _understand(manager: Manager, samples: Sequence[Sample]) -> list[Verdict | Exception]:
    if not samples:
        return []
    try:
        values = list(manager.score(samples))
        if len(values) != len(samples):
            name = type(manager).__name__
            raise ValueError(f"The reward manager {name} was given {len(samples)} samples and returned {len(values)} values.")
    except Exception as error:  # noqa: BLE001 - a manager may be the user's: its failure is that of all its samples
        return [error] * len(samples)
    return [value if isinstance(value, Exception) else _read(value) for value in values]


def _read(value: Any) -> Verdict | Exception:
    try:
        return verdict_of(value)
    except ValueError as error:
        return error


def _described(error: Exception) -> str:
    """The message, the line it came from, and the way out of the commonest trap."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    hint = ""
    if "signal only works in main thread" in str(error):
        hint = " Set reward_model.reward_manager=prime: it runs scorers in processes, where they may use signals."
    return f"{type(error).__name__}: {error}{place}{hint}"


def _report(results: Sequence[Verdict | Exception], retried: int, seconds: float) -> ScoreReport:
    errors = [result for result in results if isinstance(result, Exception)]
    timed_out = sum(isinstance(error, TimeoutError) for error in errors)
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for found in results:
        if isinstance(found, Verdict):
            columns["score"].append(found.score)
            for name, value in found.extras.items():
                if name != "score" and isinstance(value, bool | int | float) and math.isfinite(value):
                    columns[name].append(float(value))
    metrics = {f"reward/{name}/mean": sum(column) / len(column) for name, column in columns.items()}
    metrics |= {
        "reward/failed": float(len(errors)),
        "reward/timed_out": float(timed_out),
        "reward/retried": float(retried),
        "reward/seconds": seconds,
    }
    return ScoreReport(len(results), len(errors), timed_out, retried, seconds, metrics)
