"""Metrics of a training step: scores, advantages, values, lengths, turns, the mismatch between engine and
trainer, timing and throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

EXPLAINED_EPS = 1e-5


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


# --- Time per phase and per token, and throughput -----------------------------------------------------------

OVER_RESPONSE_TOKENS = ("gen",)
OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")


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
