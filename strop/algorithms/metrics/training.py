"""What a training step reports: its record with the clock of each phase, and its metrics under the names of
verl: scores, advantages, values, lengths, turns, the mismatch between engine and trainer, staleness, timing,
throughput and memory."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from strop.types import Batch, Trajectory

EXPLAINED_EPS = 1e-5
GIB = 2**30
OVER_RESPONSE_TOKENS = ("gen",)
OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")


class StepRecord:
    """Metrics of one step. `phase` is the only clock of the loop."""

    def __init__(
        self,
        on_phase: Callable[[str | None], None] | None = None,
        around: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """`on_phase` is called with every phase that begins, and with the outer phase (or None) when it ends.
        Each phase runs inside `around`, whose own time does not count."""
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.current: str | None = None
        """The phase that is running."""
        self._on_phase = on_phase
        self._around = around

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time inside the block under `name`."""
        before = self.current
        self._enter(name)
        with self._around(name), self._clock(name):
            yield
        self._enter(before)  # not after an error: `current` then says where it happened

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _enter(self, name: str | None) -> None:
        self.current = name
        if self._on_phase is not None:
            self._on_phase(name)

    def add(self, metrics: Mapping[str, float], prefix: str = "") -> None:
        """Add metrics under `prefix` and their names."""
        for name, value in metrics.items():
            self.metrics[f"{prefix}{name}"] = float(value)

    @contextmanager
    def metrics_into(self, found: dict[str, float]) -> Iterator[None]:
        """Inside the block metrics are added to `found` instead. Time still counts here."""
        before = self.metrics
        self.metrics = found
        try:
            yield
        finally:
            self.metrics = before


# --- scores, lengths, turns ---------------------------------------------------------------------------------

_OF_SCORES = ("critic/score/", "critic/rewards/", "critic/returns/")


def step_metrics(
    batch: Batch,
    trajectories: Sequence[Trajectory],
    *,
    max_prompt_length: int,
    max_response_length: int,
    has_task_reward: bool = True,
) -> dict[str, float]:
    """Scores, advantages, lengths and turns. A sample without a score counts in lengths and turns only.

    `has_task_reward`: False if no sample is scored, so that there are advantages only.
    """
    measure = partial(
        batch_metrics, max_prompt_length=max_prompt_length, max_response_length=max_response_length
    )
    turns = [t.num_turns for t in trajectories]
    metrics = measure(batch, turns)
    scored = [row for row, t in enumerate(trajectories) if t.score is not None]
    if len(scored) < len(batch):
        metrics = {name: value for name, value in metrics.items() if not name.startswith("critic/")}
        if scored:
            of_scored = measure(batch.select(scored), [turns[row] for row in scored])
            metrics |= {name: value for name, value in of_scored.items() if name.startswith("critic/")}
    if not has_task_reward:
        return {name: value for name, value in metrics.items() if not name.startswith(_OF_SCORES)}
    return metrics | zero_variance(trajectories)


def batch_metrics(
    batch: Batch, turns: Sequence[int], *, max_prompt_length: int, max_response_length: int
) -> dict[str, float]:
    """`data_metrics` of a batch with advantages."""
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
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        values=batch.values,
        num_turns=turns,
    )


def data_metrics(
    *,
    token_level_scores: Tensor,
    token_level_rewards: Tensor,
    advantages: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    max_prompt_length: int,
    max_response_length: int,
    values: Tensor | None = None,
    num_turns: Sequence[int] | None = None,
    tool_call_counts: Sequence[int] | None = None,
) -> dict[str, float]:
    """Metrics of one step; tensors are (rows, response width), lengths are (rows,).

    `response_lengths` counts all tokens of the response, tool output included; `response_mask` marks the
    trained ones. A row with an empty response was aborted: it counts in `response/aborted_ratio`, but not in
    scores and rewards. Value metrics need `values` (a critic). Metrics without data (all rows aborted, an
    empty mask) are left out.
    """
    _check_rows(
        token_level_scores,
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        response_mask=response_mask,
    )
    alive = response_lengths > 0
    trained = response_mask.bool()
    metrics = {
        **_spread("critic/score", token_level_scores.sum(-1)[alive]),
        **_spread("critic/rewards", token_level_rewards.sum(-1)[alive]),
        **_spread("critic/advantages", advantages[trained]),
        **_spread("critic/returns", returns[trained]),
    }
    if values is not None:
        metrics |= _spread("critic/values", values[trained])
        if trained.sum() > 1:
            metrics["critic/vf_explained_var"] = explained_variance(values[trained], returns[trained])
    metrics |= _lengths("response_length", response_lengths, max_response_length)
    metrics |= _lengths("response_length_non_aborted", response_lengths[alive], max_response_length)
    metrics["response/aborted_ratio"] = (~alive).float().mean().item()
    metrics |= _lengths("prompt_length", prompt_lengths, max_prompt_length)
    for name, counts in (("num_turns", num_turns), ("tool_call_counts", tool_call_counts)):
        if counts is not None:
            metrics |= count_metrics(name, counts)
    return metrics


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - var(R - V) / (var(R) + 1e-5): 1 for a perfect critic, 0 for a constant one, negative for a harmful
    one."""
    return (1.0 - (returns - values).var() / (returns.var() + EXPLAINED_EPS)).item()


def count_metrics(name: str, counts: Sequence[int] | Sequence[float]) -> dict[str, float]:
    """min, max and mean of a number per row."""
    if len(counts) == 0:
        return {}
    array = np.asarray(counts)
    return {
        f"{name}/min": array.min().item(),
        f"{name}/max": array.max().item(),
        f"{name}/mean": array.mean().item(),
    }


def probability_drift(rollout_log_probs: Tensor, trainer_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Mismatch between engine and trainer: |exp(a) - exp(b)| of their log-probs over the sampled tokens.

    A mean below 0.005 is rounding error; above 0.01 engine and trainer compute different models.
    """
    prefix = "training/rollout_probs_diff"
    chosen = mask.bool()
    if not chosen.any():
        return {f"{prefix}_valid": 0.0}
    trainer_probs = trainer_log_probs[chosen].float().exp()
    rollout_probs = rollout_log_probs[chosen].float().exp()
    gap = (trainer_probs - rollout_probs).abs()
    metrics = {f"{prefix}_valid": 1.0, f"{prefix}_max": gap.max().item(), f"{prefix}_mean": gap.mean().item()}
    if gap.numel() > 1:
        metrics[f"{prefix}_std"] = gap.std().item()
        correlation = torch.corrcoef(torch.stack([trainer_probs, rollout_probs]))[0, 1].item()
        if correlation == correlation:  # NaN when one side is constant
            metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def _lengths(name: str, lengths: Tensor, cap: int) -> dict[str, float]:
    if lengths.numel() == 0:
        return {}
    return {**_spread(name, lengths.float()), f"{name}/clip_ratio": (lengths == cap).float().mean().item()}


def _check_rows(scores: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.shape != scores.shape[: tensor.dim()]:
            raise ValueError(
                f"`{name}` has shape {tuple(tensor.shape)}, but token_level_scores has "
                f"{tuple(scores.shape)}: the rows (and for masks the columns) must agree."
            )


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


# --- age of the weights that sampled ------------------------------------------------------------------------


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
    old_tokens = 0
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
                old_tokens += count if age > 0 else 0
                oldest = age if oldest is None else max(oldest, age)
    if oldest is None:
        return {}
    return {
        "staleness/mean": total_age / tokens,
        "staleness/max": oldest,
        "staleness/old_tokens": old_tokens / tokens,
        "staleness/old_samples": old_samples / len(trajectories),
        "staleness/mixed_samples": mixed_samples / len(trajectories),
    }


# --- time per phase and per token, throughput ---------------------------------------------------------------


def speed_metrics(batch: Batch, seconds: Mapping[str, float], devices: int) -> dict[str, float]:
    """Seconds per phase and per token, tokens per second."""
    tokens = sum(batch.lengths)
    response_tokens = int(batch.response_lengths.sum())
    metrics = timing_metrics(seconds, response_tokens=response_tokens, total_tokens=tokens)
    return metrics | throughput_metrics(total_tokens=tokens, step_seconds=seconds["step"], devices=devices)


def timing_metrics(
    seconds: Mapping[str, float], *, response_tokens: int, total_tokens: int
) -> dict[str, float]:
    """`timing_s/<phase>` for every phase, and `timing_per_token_ms/<phase>` for the phases whose work grows
    with tokens.

    Generation is divided by the response tokens, the other phases by prompt and response tokens together.
    """
    metrics = {f"timing_s/{phase}": spent for phase, spent in seconds.items()}
    for phases, tokens in ((OVER_RESPONSE_TOKENS, response_tokens), (OVER_ALL_TOKENS, total_tokens)):
        if tokens > 0:
            metrics |= {
                f"timing_per_token_ms/{p}": seconds[p] * 1000 / tokens for p in phases if p in seconds
            }
    return metrics


def throughput_metrics(*, total_tokens: int, step_seconds: float, devices: int) -> dict[str, float]:
    """Tokens of the step, its wall time, and tokens per second per device."""
    if devices < 1 or step_seconds <= 0:
        raise ValueError(
            f"Throughput needs devices >= 1 and a positive step time, got {devices} and {step_seconds}."
        )
    return {
        "perf/total_num_tokens": total_tokens,
        "perf/time_per_step": step_seconds,
        "perf/throughput": total_tokens / (step_seconds * devices),
    }


# --- memory -------------------------------------------------------------------------------------------------


def memory_metrics() -> dict[str, float]:
    """Memory of the host, of this process and of its GPU, in GiB. GPU peaks are since the last call."""
    return {**_host_memory(), **_gpu_memory()}


def _host_memory() -> dict[str, float]:
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        known = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    except (OSError, ValueError, IndexError):  # no Linux
        return {}
    used = known["MemTotal"] - known["MemAvailable"]
    return {"perf/cpu_memory_used_gb": used / GIB, "perf/process_memory_gb": resident / GIB}


def _gpu_memory() -> dict[str, float]:
    # A query would initialize CUDA.
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    peaks = {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / GIB,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved() / GIB,
    }
    torch.cuda.reset_peak_memory_stats()
    return peaks
