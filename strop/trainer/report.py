"""The numbers of a step, under the names people know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from strop.algorithms.metrics.data import data_metrics
from strop.algorithms.metrics.timing import throughput_metrics, timing_metrics
from strop.data.balance import balanced_partitions, imbalance_metrics
from strop.trainer.record import StepRecord
from strop.types import Batch, Trajectory


def describe(batch: Batch, trajectories: Sequence[Trajectory], config: Any) -> dict[str, float]:
    """Scores, advantages, lengths and turns. A sample without a score counts in lengths and turns alone."""
    turns = [t.num_turns for t in trajectories]
    metrics = _metrics(batch, turns, config)
    scored = [row for row, t in enumerate(trajectories) if t.score is not None]
    if len(scored) < len(batch):
        metrics = {name: value for name, value in metrics.items() if not name.startswith("critic/")}
        known = _metrics(batch.select(scored), [turns[row] for row in scored], config) if scored else {}
        metrics |= {name: value for name, value in known.items() if name.startswith("critic/")}
    return metrics | zero_variance(trajectories)


def zero_variance(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Share of the prompts with several scored answers whose answers all earned the same: they teach a comparison nothing."""
    groups: dict[int, list[float]] = defaultdict(list)
    for t in trajectories:
        if t.reward is not None:
            groups[t.group].append(t.reward)
    compared = [rewards for rewards in groups.values() if len(rewards) > 1]
    if not compared:
        return {}
    return {"critic/zero_variance_groups": sum(min(rewards) == max(rewards) for rewards in compared) / len(compared)}


def _metrics(batch: Batch, turns: Sequence[int], config: Any) -> dict[str, float]:
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


def speed(batch: Batch, record: StepRecord, devices: int, *, balance: bool) -> dict[str, float]:
    """Seconds per phase and per token, tokens per second, tokens per device."""
    tokens = sum(batch.lengths)
    metrics = timing_metrics(record.seconds, response_tokens=int(batch.response_lengths.sum()), total_tokens=tokens)
    metrics |= throughput_metrics(total_tokens=tokens, step_seconds=record.seconds["step"], devices=devices)
    if balance:
        metrics |= imbalance_metrics(batch.lengths, balanced_partitions(batch.lengths, devices))
    return metrics
