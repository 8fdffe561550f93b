"""Health rules about the log-probs of the engine that samples and of the trainer that learns."""

from __future__ import annotations

from statistics import median

from strop.config.arithmetic import QUANTIZED
from strop.run.health.history import LAST, History, RuleFinding

MISMATCH_LIMIT = 0.01
"""Mean difference of probabilities between engine and trainer; rounding of bfloat16 stays below 0.005."""
QUANTIZED_FACTOR = 3
"""With weights or a KV cache of 8 bits, that of a 0.5B model is 0.012; importance weights correct for it."""
MISMATCH_PER_UPDATE = 0.1
"""What each weight update between sampling and training may add to it."""
FIRST_STEP_LIMIT = {"fp32": 0.05, "float32": 0.05, QUANTIZED: 0.1 * QUANTIZED_FACTOR}
FIRST_STEP_LIMIT_16_BIT = 0.1
"""Mean difference of log-probs in the first step, where engine and trainer have the same weights."""
ROUNDING = 0.99
SAME_MODEL = 0.9
"""Correlations of probabilities: above the first, numbers differ a little everywhere; below the second,
engine and trainer hardly compute the same model."""


def rollout_mismatch(history: History) -> RuleFinding | None:
    """Engine and trainer disagree about probabilities, more than staleness explains.

    Off-policy samples differ because the weights have changed since; on-policy samples show a real mismatch.
    """
    name = "training/rollout_probs_diff_mean"
    gaps = history.last(name, LAST)
    ages = history.last("staleness/mean", LAST)
    limit = MISMATCH_LIMIT * (QUANTIZED_FACTOR if history.precision == QUANTIZED else 1)
    young = gaps
    if ages:
        young = [gap for gap, age in zip(gaps, ages) if age == 0]
    if young and (len(young) >= 3 or any(ages)) and (gap := median(young[-3:])) > limit:
        meaning = "on average, for samples of the same weights" if any(ages) else "on average"
        return _differ(gap, meaning, {name: gap})
    gap = history.recent(name, 3) or 0.0
    age = history.recent("staleness/mean", 3) or 0.0
    if not any(ages) or gap <= limit + MISMATCH_PER_UPDATE * age:
        return None
    return _differ(
        gap,
        f"on average, which samples that are {age:.2g} updates old do not explain",
        {name: gap, "age": age},
    )


def _differ(gap: float, meaning: str, values: dict[str, float]) -> RuleFinding:
    return RuleFinding(
        f"The engine that samples and the trainer that learns differ by {gap:.3g} in the probability of "
        f"tokens, {meaning}.",
        values,
    )


def first_step_mismatch(history: History) -> RuleFinding | None:
    """In the first step engine and trainer have the same weights, and still their log-probs differ a lot."""
    name = "training/rollout_logprobs_diff_mean"
    gaps = history.last(name, 1)
    limit = FIRST_STEP_LIMIT.get(history.precision, FIRST_STEP_LIMIT_16_BIT)
    if history.steps != 1 or not gaps or gaps[0] <= limit:
        return None
    values = {name: gaps[0], "limit": limit}
    correlations = history.last("training/rollout_actor_probs_pearson_corr", 1)
    cause = "weights that the engine did not load, or layers that it computes otherwise"
    if correlations:
        values["correlation"] = correlations[0]
        cause = _likely_cause(correlations[0])
    return RuleFinding(
        f"In the first step the log-probs of engine and trainer differ by {gaps[0]:.3g} on average; "
        f"{limit:g} would be much for {history.precision}. The likely cause: {cause}.",
        values,
    )


def _likely_cause(correlation: float) -> str:
    if correlation >= ROUNDING:
        return "another precision or quantization of the engine"
    if correlation >= SAME_MODEL:
        return (
            "another temperature, or a part of the model that the engine leaves out or computes otherwise "
            "(sparse or chunked attention, a soft cap, the choice of experts)"
        )
    return "other weights in the engine than in the trainer, or layers that the engine does not know"
