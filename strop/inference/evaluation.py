"""`strop eval`: scores the responses of a file and computes the metrics of each data source.

A response that cannot be scored does not count as zero: no mean includes it, and the report shows the number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from strop.algorithms.metrics.validation import Estimate, best_of, bootstrap_mean, majority_of, subset_sizes
from strop.compat import conventions
from strop.config.schema.inference import EvaluationConfig, EvaluationSettingsConfig
from strop.config.schema.reward import RewardModelConfig
from strop.data.files import FileRows, Row, open_rows
from strop.data.make import published_rows
from strop.data.schema import columns_by_name, require_column, to_plain
from strop.inference.resumable_rows import ProgressBar
from strop.rewards.base import RewardSample, Verdict, parse_verdict
from strop.rewards.function import RewardFunction, RuleScorer, load_function
from strop.rewards.managers import BatchRewardManager, NaiveRewardManager, PrimeRewardManager
from strop.rewards.votes import can_vote, vote_of
from strop.types import Prompt, Trajectory

SCORING_BATCH_SIZE = 512
"""Responses that are scored between two updates of the progress bar."""
TRIED_PROMPTS = 4
"""Prompts of each data source with which the scorer is tried before a run."""


@dataclass
class ScoredPrompt:
    """A prompt with its responses and their scores. The lists have one entry per response."""

    row: int
    source: str
    prompt: object
    """Messages or text; None where the file has no such column."""
    truth: object
    responses: list[object]
    extra_info: dict[str, object] = field(default_factory=dict)
    scores: list[float | None] = field(default_factory=list)
    correct: list[float | None] = field(default_factory=list)
    """1 or 0 where the scorer says which; None where it does not, or failed."""
    votes: list[str | None] | None = None
    """The final answers, for maj@k. None: no answer can be extracted from these responses."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """Other numbers that the scorer returned for responses, by name; `acc` is in `correct`."""
    errors: list[str] = field(default_factory=list)
    timed_out: int = 0
    columns: dict[str, object] = field(default_factory=dict)
    """What a reward function may ask for by name besides extra_info."""

    @property
    def scored(self) -> list[float]:
        """The scores of the responses that could be scored."""
        return [score for score in self.scores if score is not None]

    def correctness(self) -> list[float]:
        """1 or 0 of each response for which it is known."""
        return [right for right in self.correct if right is not None]

    def correctness_with_votes(self) -> list[tuple[float, str | None]]:
        """(1 or 0, vote) of each response for which the correctness is known."""
        votes = self.votes or [None] * len(self.correct)
        return [(right, vote) for right, vote in zip(self.correct, votes) if right is not None]


@dataclass
class SourceResult:
    """Counts and metrics of one data source."""

    prompts: int
    responses: int
    failed: int
    """Responses without a score."""
    timed_out: int
    """Responses without a score because scoring took longer than the timeout."""
    unanswered: int
    """Prompts without any response."""
    first_error: str | None
    metrics: dict[str, Estimate]
    """score; also pass@k and maj@k where every score is right or wrong, otherwise best@k."""


def evaluate(
    config: EvaluationConfig,
    path: str | Sequence[str] | None = None,
    given: Callable[..., object] | None = None,
) -> list[ScoredPrompt]:
    """Score every response of the file `path`, by default data.path. `given` is a reward function of the
    caller, which is called in this process."""
    scored_prompts = read_responses(config, path)
    _check_sizes(scored_prompts, config.evaluation.k)
    function = _scorer(config)
    if given is not None:
        function = RewardFunction(given, takes_lists=None, timeout=config.evaluation.timeout)
    score_all(scored_prompts, function, config.evaluation, here=given is not None)
    return scored_prompts


def try_scorer(config: EvaluationConfig) -> dict[str, str]:
    """Score a response of the first prompts of each data source. Returns the first error of each source none
    of which could be scored; raises as `evaluate` if that is all of them."""
    prompts = read_responses(config)
    _check_sizes(prompts, config.evaluation.k)
    tried: dict[str, list[ScoredPrompt]] = {}
    for prompt in prompts:
        of_source = tried.setdefault(prompt.source, [])
        if prompt.responses and len(of_source) < TRIED_PROMPTS:
            of_source.append(replace(prompt, responses=prompt.responses[:1]))
    score_all([prompt for some in tried.values() for prompt in some], _scorer(config), config.evaluation)
    failed = {}
    for source, some in tried.items():
        if some and not any(prompt.scored for prompt in some):
            failed[source] = some[0].errors[0]
    return failed


def _scorer(config: EvaluationConfig) -> RewardFunction | RuleScorer:
    settings = config.evaluation
    own = config.custom_reward_function
    if not own.path:
        return RuleScorer(settings.timeout, compat=conventions(settings.compat).scorers)
    return load_function(own.path, own.name, own.reward_kwargs, takes_lists=None, timeout=settings.timeout)


def _check_sizes(prompts: Sequence[ScoredPrompt], sizes: Sequence[int] | None) -> None:
    """A ValueError for a value of k for which no prompt has enough responses: its metric would be missing."""
    most = max((len(prompt.responses) for prompt in prompts), default=0)
    largest = max(sizes or [0])
    if largest > most:
        raise ValueError(
            f"evaluation.k={list(sizes or [])}: pass@{largest} needs {largest} responses to a prompt, and no "
            f"prompt has more than {most}. Lower it, or generate more (data.n_samples={largest})."
        )


def open_responses(config: EvaluationConfig, path: str | Sequence[str] | None = None) -> FileRows:
    """The files of responses; raises if a column is missing."""
    data = config.data
    files = open_rows(path or data.path, key="data.path")
    needed = {"data.response_key": data.response_key}
    if not data.benchmark and not _needs_no_source(config):
        needed["data.data_source_key"] = data.data_source_key
    for file in files.files:
        for setting, column in needed.items():
            require_column(file.columns, column, setting=setting, where=file.address)
    return files


def _needs_no_source(config: EvaluationConfig) -> bool:
    """Whether the usual column may be missing: a function of the user's scores all rows."""
    return bool(config.custom_reward_function.path) and config.data.data_source_key == "data_source"


def read_responses(config: EvaluationConfig, path: str | Sequence[str] | None = None) -> list[ScoredPrompt]:
    """The prompts and responses of the files, without scores."""
    files = open_responses(config, path)
    rows: Sequence[Row] = files
    if config.data.benchmark:
        rows = published_rows(config.data.benchmark, files)
    return [_scored_prompt(row, index, config, files) for index, row in enumerate(rows)]


def _scored_prompt(row: Row, index: int, config: EvaluationConfig, files: FileRows) -> ScoredPrompt:
    data = config.data
    of_file = () if data.benchmark else files.place(index)[0].columns
    source = to_plain(row.get(data.data_source_key))
    if source is None and _needs_no_source(config) and data.data_source_key not in of_file:
        source = "custom"
    prompt = to_plain(row.get(data.prompt_key))
    reward = to_plain(row.get(data.reward_model_key))
    responses = to_plain(row.get(data.response_key))
    if source is None:
        raise ValueError(
            f"{files.where(index)}: the column {data.data_source_key!r} is empty; it chooses the scorer."
        )
    if isinstance(responses, str):
        responses = [responses]
    if responses is not None and not isinstance(responses, list):
        kind = type(responses).__name__
        raise ValueError(
            f"{files.where(index)}: the column {data.response_key!r} holds a {kind}; a list of texts is "
            "needed."
        )
    truth = reward
    if isinstance(reward, Mapping):
        truth = reward.get("ground_truth")
    extra_info = to_plain(row.get("extra_info"))
    if not isinstance(extra_info, dict):
        extra_info = {}
    plain = {name: to_plain(value) for name, value in row.items()}
    columns = columns_by_name(plain, of_file, data.prompt_key, hidden=(data.response_key,))
    return ScoredPrompt(index, str(source), prompt, truth, responses or [], extra_info, columns=columns)


def score_all(
    scored_prompts: Sequence[ScoredPrompt],
    function: RewardFunction | RuleScorer,
    settings: EvaluationSettingsConfig,
    *,
    here: bool = False,
) -> None:
    """Fill in scores, correctness, votes and errors. Worker processes score, with a timeout per response;
    threads of this process if `here`."""
    workers = RewardModelConfig(num_workers=settings.num_workers, timeout=settings.timeout)
    manager: NaiveRewardManager | PrimeRewardManager | BatchRewardManager
    if isinstance(function, RewardFunction) and function.takes_lists:
        manager = BatchRewardManager(function, workers)
    elif function.is_async or here:
        manager = NaiveRewardManager(function, workers)
    else:
        manager = PrimeRewardManager(function, workers)
    pairs: list[tuple[ScoredPrompt, object]] = []
    for prompt in scored_prompts:
        for response in prompt.responses:
            pairs.append((prompt, response))
    try:
        with ProgressBar("eval", len(pairs), unit="responses") as progress:
            for start in range(0, len(pairs), SCORING_BATCH_SIZE):
                batch = pairs[start : start + SCORING_BATCH_SIZE]
                values = manager.score([_sample(prompt, response) for prompt, response in batch])
                for (prompt, response), value in zip(batch, values, strict=True):
                    _add_score(prompt, response, _verdict(response, value))
                progress.advance(len(batch))
    finally:
        for part in (manager, function):
            if hasattr(part, "close"):
                part.close()
    if not pairs:
        raise ValueError("No row has a response, so there is nothing to score.")
    if not any(prompt.scored for prompt in scored_prompts):
        first = next(prompt for prompt in scored_prompts if prompt.errors)
        raise ValueError(
            f"Scoring failed for all {len(pairs)} responses. The first, row {first.row} of {first.source}: "
            f"{first.errors[0]}"
        )


def _sample(prompt: ScoredPrompt, response: object) -> RewardSample:
    """The input of a reward manager."""
    messages = prompt.prompt
    if not isinstance(messages, list):
        messages = [{"role": "user", "content": str(prompt.prompt)}]
    row = Prompt(prompt.row, [], messages, prompt.source, prompt.truth, prompt.extra_info, prompt.columns)
    trajectory = Trajectory(row, 0, [], [], [])
    return RewardSample(trajectory, cast("str", response), dict(prompt.extra_info))


def _verdict(response: object, value: object) -> Verdict | Exception:
    """The parsed return value of the reward function, or why there is no score."""
    if not isinstance(response, str):
        return ValueError(f"The response is {type(response).__name__}, not text.")
    if isinstance(value, Exception):
        return value
    try:
        return parse_verdict(value)
    except ValueError as error:
        return error


def _add_score(prompt: ScoredPrompt, response: object, verdict: Verdict | Exception) -> None:
    """Append the result of one response to the lists of its prompt."""
    if isinstance(verdict, Exception):
        prompt.errors.append(f"{type(verdict).__name__}: {verdict}")
        prompt.timed_out += isinstance(verdict, TimeoutError)
        prompt.scores.append(None)
        prompt.correct.append(None)
        if prompt.votes is not None:
            prompt.votes.append(None)
        return
    right = verdict.extras.get("acc", verdict.score)
    prompt.scores.append(verdict.score)
    prompt.correct.append(float(right) if right in (0, 1) else None)
    for name, value in verdict.extras.items():
        if name not in ("score", "acc") and isinstance(value, int | float) and math.isfinite(value):
            prompt.parts.setdefault(name, []).append(float(value))
    votes = can_vote(prompt.source, verdict.extras)
    if votes and prompt.votes is None:
        prompt.votes = [None] * (len(prompt.scores) - 1)
    if prompt.votes is None:
        return
    vote = None
    if votes:
        vote = vote_of(prompt.source, cast("str", response), verdict.extras)
    prompt.votes.append(vote)


def summarise(
    scored_prompts: Iterable[ScoredPrompt], settings: EvaluationSettingsConfig
) -> dict[str, SourceResult]:
    """Results per data source, in the order in which sources appear."""
    by_source: dict[str, list[ScoredPrompt]] = {}
    for prompt in scored_prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    return {source: _summary(prompts, settings) for source, prompts in by_source.items()}


def _summary(prompts: list[ScoredPrompt], settings: EvaluationSettingsConfig) -> SourceResult:
    metrics: dict[str, Estimate] = {}
    for name, values in _columns(prompts, settings).items():
        if values:
            metrics[name] = bootstrap_mean(
                values, draws=settings.bootstrap, confidence=settings.confidence, seed=settings.seed
            )
    result = SourceResult(
        prompts=len(prompts),
        responses=0,
        failed=0,
        timed_out=0,
        unanswered=0,
        first_error=None,
        metrics=metrics,
    )
    for prompt in prompts:
        result.responses += len(prompt.responses)
        result.failed += len(prompt.errors)
        result.timed_out += prompt.timed_out
        result.unanswered += not prompt.responses
        if result.first_error is None and prompt.errors:
            result.first_error = prompt.errors[0]
    return result


def has_binary_scores(prompts: Sequence[ScoredPrompt]) -> bool:
    """Whether every score of these prompts says right or wrong, so that there is an accuracy."""
    any_score = False
    for prompt in prompts:
        for score, right in zip(prompt.scores, prompt.correct):
            if score is None:
                continue
            any_score = True
            if right is None:
                return False
    return any_score


def _columns(prompts: list[ScoredPrompt], settings: EvaluationSettingsConfig) -> dict[str, list[float]]:
    """The value of each metric for every prompt that has one."""
    columns: dict[str, list[float]] = {"score": [_mean(p.scored) for p in prompts if p.scored]}
    max_responses = max((len(prompt.responses) for prompt in prompts), default=0)
    sizes = settings.k or [1, *subset_sizes(max_responses)]
    binary = has_binary_scores(prompts)
    for k in sizes:
        if binary:
            columns[f"pass@{k}"] = _best_of_k([prompt.correctness() for prompt in prompts], k)
        if binary and k > 1:
            columns[f"maj@{k}"] = _majority_of_k(prompts, k, settings.seed)
        if not binary and k > 1:
            columns[f"best@{k}"] = _best_of_k([prompt.scored for prompt in prompts], k)
    for prompt in prompts:
        for name, values in prompt.parts.items():
            columns.setdefault(name, []).append(_mean(values))
    return columns


def _best_of_k(values_per_prompt: Sequence[Sequence[float]], k: int) -> list[float]:
    """The expected best of k responses, for every prompt with at least k values."""
    return [best_of(values, k)[0] for values in values_per_prompt if len(values) >= k]


def _majority_of_k(prompts: Sequence[ScoredPrompt], k: int, seed: int) -> list[float]:
    """The mean correctness of the majority vote of k responses, for every prompt with at least k."""
    means: list[float] = []
    for prompt in prompts:
        pairs = prompt.correctness_with_votes()
        if prompt.votes and len(pairs) >= k:
            values, votes = zip(*pairs)
            means.append(majority_of(values, votes, k, seed=seed)[0])
    return means


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
