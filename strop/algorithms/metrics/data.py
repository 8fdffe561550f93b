"""What a training batch looked like: scores, advantages, values, lengths, turns, drift of the sampler."""

from __future__ import annotations

from collections.abc import Sequence

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

    `response_lengths` counts every token of the response, tool output included, while `response_mask` marks the trained ones.
    A row whose response is empty was aborted: it is counted in `response/aborted_ratio` and left out of scores and rewards.
    With `values` (a critic) the value metrics appear. Metrics over nothing (all rows aborted, an empty mask) are left out.
    """
    _check_rows(
        token_level_scores, prompt_lengths=prompt_lengths, response_lengths=response_lengths, response_mask=response_mask
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
    """1 - var(R - V) / (var(R) + 1e-5): 1 for a perfect critic, 0 for a constant one, negative for a harmful one."""
    return (1.0 - (returns - values).var() / (returns.var() + EXPLAINED_EPS)).item()


def count_metrics(name: str, counts: Sequence[int] | Sequence[float]) -> dict[str, float]:
    """min, max and mean of a number per row."""
    if len(counts) == 0:
        return {}
    array = np.asarray(counts)
    return {f"{name}/min": array.min().item(), f"{name}/max": array.max().item(), f"{name}/mean": array.mean().item()}


def probability_drift(rollout_log_probs: Tensor, trainer_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the engine that sampled is from the trainer that learns: |exp(a) - exp(b)| over the sampled tokens.

    A mean below 0.005 is ordinary rounding; above 0.01 the two disagree about the model.
    """
    prefix = "training/rollout_probs_diff"
    chosen = mask.bool()
    if not chosen.any():
        return {f"{prefix}_valid": 0.0}
    ours, theirs = trainer_log_probs[chosen].float().exp(), rollout_log_probs[chosen].float().exp()
    gap = (ours - theirs).abs()
    metrics = {f"{prefix}_valid": 1.0, f"{prefix}_max": gap.max().item(), f"{prefix}_mean": gap.mean().item()}
    if gap.numel() > 1:
        metrics[f"{prefix}_std"] = gap.std().item()
        correlation = torch.corrcoef(torch.stack([ours, theirs]))[0, 1].item()
        if correlation == correlation:  # NaN when one side is constant: no correlation to speak of
            metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    return {f"{name}/mean": values.mean().item(), f"{name}/max": values.max().item(), f"{name}/min": values.min().item()}


def _lengths(name: str, lengths: Tensor, cap: int) -> dict[str, float]:
    if lengths.numel() == 0:
        return {}
    return {**_spread(name, lengths.float()), f"{name}/clip_ratio": (lengths == cap).float().mean().item()}


def _check_rows(scores: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.shape != scores.shape[: tensor.dim()]:
            raise ValueError(
                f"`{name}` has shape {tuple(tensor.shape)}, but token_level_scores has {tuple(scores.shape)}: "
                "the rows (and for masks the columns) must agree."
            )
