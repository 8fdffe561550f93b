"""The metrics of a step, under the names that verl uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from strop.algorithms.metrics.training import data_metrics, throughput_metrics, timing_metrics
from strop.config.schema.ppo import PpoConfig
from strop.data.balance import balanced_partitions, imbalance_metrics
from strop.rewards.scorer import ScoreReport
from strop.shared.step_record import StepRecord
from strop.types import Batch, Trajectory


def data_report(batch: Batch, trajectories: Sequence[Trajectory], config: PpoConfig) -> dict[str, float]:
    """Scores, advantages, lengths and turns. A sample without a score counts in lengths and turns only."""
    turns = [t.num_turns for t in trajectories]
    metrics = _data_metrics(batch, turns, config)
    scored = [row for row, t in enumerate(trajectories) if t.score is not None]
    if len(scored) < len(batch):
        metrics = {name: value for name, value in metrics.items() if not name.startswith("critic/")}
        if scored:
            of_scored = _data_metrics(batch.select(scored), [turns[row] for row in scored], config)
            metrics |= {name: value for name, value in of_scored.items() if name.startswith("critic/")}
    return metrics | zero_variance(trajectories)


def zero_variance(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The share of prompts whose scored samples (at least two) all have the same reward: their advantages
    are 0 in every estimator that compares samples of a prompt."""
    groups: dict[int, list[float]] = defaultdict(list)
    for t in trajectories:
        if t.reward is not None:
            groups[t.group].append(t.reward)
    compared = [rewards for rewards in groups.values() if len(rewards) > 1]
    if not compared:
        return {}
    equal = sum(min(rewards) == max(rewards) for rewards in compared)
    return {"critic/zero_variance_groups": equal / len(compared)}


def _data_metrics(batch: Batch, turns: Sequence[int], config: PpoConfig) -> dict[str, float]:
    assert batch.scores is not None and batch.rewards is not None
    assert batch.advantages is not None and batch.returns is not None
    return data_metrics(
        token_level_scores=batch.scores,
        token_level_rewards=batch.rewards,
        advantages=batch.advantages,
        returns=batch.returns,
        response_mask=batch.mask,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        values=batch.values,
        num_turns=turns,
    )


def speed_report(batch: Batch, record: StepRecord, devices: int, *, balance: bool) -> dict[str, float]:
    """Seconds per phase and per token, tokens per second, tokens per device."""
    tokens = sum(batch.lengths)
    response_tokens = int(batch.response_lengths.sum())
    metrics = timing_metrics(record.seconds, response_tokens=response_tokens, total_tokens=tokens)
    metrics |= throughput_metrics(total_tokens=tokens, step_seconds=record.seconds["step"], devices=devices)
    if balance:
        metrics |= imbalance_metrics(batch.lengths, balanced_partitions(batch.lengths, devices))
    return metrics


def version_ages(trajectory: Trajectory, step: int) -> list[tuple[int, int]]:
    """(age of the weights in steps, tokens they sampled) in order. Step `step` begins with the weights of
    version step - 1, whose age is 0."""
    stretches = trajectory.versions or [(trajectory.version, trajectory.sampled)]
    return [(step - 1 - version, count) for version, count in stretches]


def staleness(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """How old the weights were that sampled the tokens of a step, and the shares of samples with old weights
    and with weights of several versions."""
    tokens = 0
    total_age = 0
    oldest: int | None = None
    old_samples = 0
    mixed_samples = 0
    for trajectory in trajectories:
        ages = version_ages(trajectory, step)
        old_samples += any(age > 0 for age, _ in ages)
        mixed_samples += len(ages) > 1
        for age, count in ages:
            if count:
                tokens += count
                total_age += age * count
                oldest = age if oldest is None else max(oldest, age)
    if oldest is None:
        return {}
    return {
        "staleness/mean": total_age / tokens,
        "staleness/max": oldest,
        "staleness/old_samples": old_samples / len(trajectories),
        "staleness/mixed_samples": mixed_samples / len(trajectories),
    }


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
