"""`strop eval`: scores for a file of answers, summed up per data source.

A response that cannot be scored is left out of every mean, counted, and shown: never a silent zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.algorithms.metrics.uncertainty import Estimate, bootstrap_mean
from strop.algorithms.metrics.validation import best_of, majority_of, subset_sizes
from strop.config.schema.inference import Evaluation, EvaluationSettings
from strop.config.schema.reward import RewardModel
from strop.data.files import Row, Rows, open_rows
from strop.data.make import published
from strop.data.schema import plain, require_column
from strop.rewards.function import RewardFunction, Rules, load_function
from strop.rewards.managers.kinds import Naive, Prime
from strop.rewards.sample import Sample
from strop.rewards.verdict import Verdict, verdict_of
from strop.rewards.votes import can_vote, vote_of
from strop.trainer.progress import Progress
from strop.types import Prompt, Trajectory

AT_ONCE = 512
"""Responses between two looks at the progress."""


@dataclass
class Judged:
    """A prompt and what became of its responses; one entry per response in the lists."""

    row: int
    source: str
    prompt: Any
    """Messages or text; None where the file has no such column."""
    truth: Any
    responses: list[Any]
    extra_info: dict[str, Any] = field(default_factory=dict)
    scores: list[float | None] = field(default_factory=list)
    correct: list[float | None] = field(default_factory=list)
    """1 or 0 where the scorer says which; None where it does not, or failed."""
    votes: list[str | None] | None = None
    """None where nobody can tell what a response votes for."""
    errors: list[str] = field(default_factory=list)
    timed_out: int = 0

    @property
    def scored(self) -> list[float]:
        return [score for score in self.scores if score is not None]

    def told(self) -> list[tuple[float, str | None]]:
        """(right or wrong, vote) of the responses that could be judged."""
        votes = self.votes or [None] * len(self.correct)
        return [(right, vote) for right, vote in zip(self.correct, votes) if right is not None]


@dataclass
class SourceResult:
    """What the responses of one data source came to."""

    prompts: int
    responses: int
    failed: int
    """Responses without a score."""
    timed_out: int
    """Of those, the ones that took too long."""
    unanswered: int
    """Prompts without any response."""
    first_error: str | None
    metrics: dict[str, Estimate]
    """score; pass@k and maj@k where scorers say right or wrong, else best@k."""


def evaluate(config: Evaluation, path: str | Sequence[str] | None = None) -> list[Judged]:
    """Score every response of a file (data.path, unless told)."""
    judged = read_answers(config, path)
    function: RewardFunction | Rules = Rules(config.evaluation.timeout)
    custom = config.custom_reward_function
    if custom.path:
        function = load_function(custom.path, custom.name, custom.reward_kwargs, timeout=config.evaluation.timeout)
    score_all(judged, function, config.evaluation)
    return judged


def open_answers(config: Evaluation, path: str | Sequence[str] | None = None) -> Rows:
    """The files of answers, with their columns made sure of."""
    data = config.data
    files = open_rows(path or data.path, key="data.path")
    needed = {"data.response_key": data.response_key}
    if not data.benchmark:
        needed["data.data_source_key"] = data.data_source_key
    for file in files.files:
        for setting, column in needed.items():
            require_column(file.columns, column, setting=setting, where=file.address)
    return files


def read_answers(config: Evaluation, path: str | Sequence[str] | None = None) -> list[Judged]:
    files = open_answers(config, path)
    rows: Sequence[Row] = published(config.data.benchmark, files) if config.data.benchmark else files
    return [_read(row, index, config, files) for index, row in enumerate(rows)]


def _read(row: Row, index: int, config: Evaluation, files: Rows) -> Judged:
    data = config.data
    keys = (data.data_source_key, data.prompt_key, data.reward_model_key, data.response_key)
    source, prompt, reward, responses = (plain(row.get(key)) for key in keys)
    if source is None:
        raise ValueError(f"{files.where(index)}: the column {data.data_source_key!r} is empty; it chooses the scorer.")
    if isinstance(responses, str):
        responses = [responses]
    if responses is not None and not isinstance(responses, list):
        kind = type(responses).__name__
        raise ValueError(f"{files.where(index)}: the column {data.response_key!r} holds a {kind}; a list of texts is needed.")
    truth = reward.get("ground_truth") if isinstance(reward, Mapping) else reward
    extra = plain(row.get("extra_info"))
    return Judged(index, str(source), prompt, truth, responses or [], extra if isinstance(extra, dict) else {})


def score_all(judged: Sequence[Judged], function: RewardFunction | Rules, settings: EvaluationSettings) -> None:
    """Fill in scores, correctness, votes and errors; in worker processes, each response under the time limit."""
    workers = RewardModel(num_workers=settings.num_workers, timeout=settings.timeout)
    manager = Naive(function, workers) if function.is_async else Prime(function, workers)
    asked = [(prompt, response) for prompt in judged for response in prompt.responses]
    try:
        with Progress("eval", len(asked), unit="responses") as progress:
            for start in range(0, len(asked), AT_ONCE):
                piece = asked[start : start + AT_ONCE]
                values = manager.score([_sample(prompt, response) for prompt, response in piece])
                for (prompt, response), value in zip(piece, values, strict=True):
                    _note(prompt, response, _verdict(response, value))
                progress.advance(len(piece))
    finally:
        for part in (manager, function):
            if hasattr(part, "close"):
                part.close()
    failed = [prompt for prompt in judged if prompt.errors]
    if asked and not any(prompt.scored for prompt in judged):
        raise ValueError(
            f"Scoring failed for all {len(asked)} responses. The first, row {failed[0].row} of {failed[0].source}: "
            f"{failed[0].errors[0]}"
        )
    if not asked:
        raise ValueError("No row has a response, so there is nothing to score.")


def _sample(prompt: Judged, response: Any) -> Sample:
    messages = prompt.prompt if isinstance(prompt.prompt, list) else [{"role": "user", "content": str(prompt.prompt)}]
    asked = Prompt(prompt.row, [], messages, prompt.source, prompt.truth, prompt.extra_info)
    return Sample(Trajectory(asked, 0, [], [], []), response, dict(prompt.extra_info))


def _verdict(response: Any, value: Any) -> Verdict | Exception:
    if not isinstance(response, str):
        return ValueError(f"The response is {type(response).__name__}, not text.")
    if isinstance(value, Exception):
        return value
    try:
        return verdict_of(value)
    except ValueError as error:
        return error


def _note(prompt: Judged, response: Any, found: Verdict | Exception) -> None:
    if isinstance(found, Exception):
        prompt.errors.append(f"{type(found).__name__}: {found}")
        prompt.timed_out += isinstance(found, TimeoutError)
    extras = {} if isinstance(found, Exception) else found.extras
    score = None if isinstance(found, Exception) else found.score
    right = extras.get("acc", score)
    prompt.scores.append(score)
    prompt.correct.append(float(right) if right in (0, 1) else None)
    voice = score is not None and can_vote(prompt.source, extras)
    if voice and prompt.votes is None:
        prompt.votes = [None] * (len(prompt.scores) - 1)
    if prompt.votes is not None:
        prompt.votes.append(vote_of(prompt.source, response, extras) if voice else None)


def summarise(judged: Iterable[Judged], settings: EvaluationSettings) -> dict[str, SourceResult]:
    """Results per data source, in the order in which sources appear."""
    by_source: dict[str, list[Judged]] = {}
    for prompt in judged:
        by_source.setdefault(prompt.source, []).append(prompt)
    return {source: _summary(prompts, settings) for source, prompts in by_source.items()}


def _summary(prompts: list[Judged], settings: EvaluationSettings) -> SourceResult:
    errors = Counter(error for prompt in prompts for error in prompt.errors)
    return SourceResult(
        prompts=len(prompts),
        responses=sum(len(prompt.responses) for prompt in prompts),
        failed=errors.total(),
        timed_out=sum(prompt.timed_out for prompt in prompts),
        unanswered=sum(not prompt.responses for prompt in prompts),
        first_error=next(iter(errors), None),
        metrics={
            name: bootstrap_mean(values, draws=settings.bootstrap, confidence=settings.confidence, seed=settings.seed)
            for name, values in _columns(prompts, settings).items()
            if values
        },
    )


def says_right_or_wrong(prompts: Sequence[Judged]) -> bool:
    """Whether every score of these prompts comes with a yes or no: then they have an accuracy."""
    pairs = [pair for prompt in prompts for pair in zip(prompt.scores, prompt.correct)]
    return any(score is not None for score, _ in pairs) and all(score is None or right is not None for score, right in pairs)


def _columns(prompts: list[Judged], settings: EvaluationSettings) -> dict[str, list[float]]:
    """The value of each metric for every prompt that has one."""
    columns: dict[str, list[float]] = {"score": [_mean(p.scored) for p in prompts if p.scored]}
    longest = max((len(prompt.responses) for prompt in prompts), default=0)
    sizes = settings.k or [1, *subset_sizes(longest)]
    binary = says_right_or_wrong(prompts)
    for k in sizes:
        if binary:
            columns[f"pass@{k}"] = [best_of([right for right, _ in p.told()], k)[0] for p in prompts if len(p.told()) >= k]
        if binary and k > 1:
            columns[f"maj@{k}"] = [_majority(p, k, settings.seed) for p in prompts if p.votes and len(p.told()) >= k]
        if not binary and k > 1:
            columns[f"best@{k}"] = [best_of(p.scored, k)[0] for p in prompts if len(p.scored) >= k]
    return columns


def _majority(prompt: Judged, k: int, seed: int) -> float:
    values, votes = zip(*prompt.told())
    return majority_of(values, votes, k, seed=seed)[0]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
