"""What a batch must carry before it can be learned from: log-probs, values, shaped rewards, advantages.

Each function takes a batch and returns a fuller one. What a configuration does not need is not computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from strop.algorithms.advantages import AdvantageResult, estimate
from strop.algorithms.kl import KLController
from strop.algorithms.metrics.data import probability_drift
from strop.algorithms.reward_shaping import kl_in_reward
from strop.algorithms.rollout_correction import correct_rollout
from strop.algorithms.selection import pf_ppo_weights, resample_rows
from strop.backends.base import Backend, MicroBatching, Outputs
from strop.backends.nonfinite import NonFiniteLoss, suspects
from strop.catalog import ADVANTAGES
from strop.config.asynchrony import correction_of, old_from_engine
from strop.config.objective import needs
from strop.trainer.record import StepRecord
from strop.trainer.seeds import stream_seed
from strop.types import Batch, Trajectory, pad_columns

RESAMPLING_STREAM = 0x5EED
"""Keeps the random numbers of resampling apart from those of shuffling."""


def add_old_log_probs(batch: Batch, actor: Backend, config: Any, micro: MicroBatching, record: StepRecord) -> Batch:
    """Log-probs under the weights the step began with: recomputed, or the engine's own."""
    settings = config.actor_rollout_ref.actor
    squares = ["sum_pi_squared"] if settings.calculate_sum_pi_squared or "sum_pi_squared" in needs(config) else []
    if old_from_engine(config):
        found = actor.forward(batch, squares, micro) if squares else Outputs()
        return batch.replace(old_log_probs=batch.rollout_log_probs, sum_pi_squared=found.sum_pi_squared)
    found = actor.forward(batch, ["log_probs", "entropy", *squares], micro)
    assert found.log_probs is not None and found.entropy is not None
    record.add(drift(batch, found.log_probs))
    record.add({"actor/entropy": float((found.entropy * batch.mask).sum() / batch.mask.sum().clamp(min=1))})
    return batch.replace(old_log_probs=found.log_probs, entropy=found.entropy, sum_pi_squared=found.sum_pi_squared)


def drift(batch: Batch, log_probs: torch.Tensor) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's, per sampled token."""
    if batch.rollout_log_probs is None or not bool(batch.mask.any()):
        return {}
    gap = (log_probs - batch.rollout_log_probs).abs()[batch.mask.bool()]
    return {
        **probability_drift(batch.rollout_log_probs, log_probs, batch.mask),
        "training/rollout_logprobs_diff_mean": float(gap.mean()),
        "training/rollout_logprobs_diff_max": float(gap.max()),
    }


def add_ref_log_probs(batch: Batch, reference: Backend, micro: MicroBatching) -> Batch:
    return batch.replace(ref_log_probs=reference.forward(batch, ["log_probs"], micro).log_probs)


def add_values(batch: Batch, critic: Backend, micro: MicroBatching) -> Batch:
    values = critic.forward(batch, ["values"], micro).values
    assert values is not None
    return batch.replace(values=values * batch.mask)


def refuse_nonfinite(batch: Batch) -> None:
    """Stop here when a model said NaN or infinity about a token that would be trained."""
    rows, causes = suspects(batch, {})
    if rows:
        assert batch.row_ids is not None
        raise NonFiniteLoss([int(batch.row_ids[row]) for row in rows], causes, float("nan"))


def shape_rewards(batch: Batch, config: Any, controller: KLController, record: StepRecord) -> Batch:
    """Scores, less the price of leaving the reference."""
    if not config.algorithm.use_kl_in_reward:
        return batch.replace(rewards=batch.scores)
    assert batch.scores is not None and batch.old_log_probs is not None and batch.ref_log_probs is not None
    shaped = kl_in_reward(
        batch.scores,
        batch.old_log_probs,
        batch.ref_log_probs,
        batch.mask,
        coef=controller.value,
        estimator=config.algorithm.kl_penalty,
    )
    record.add({"actor/reward_kl_penalty": shaped.kl, "actor/reward_kl_penalty_coeff": controller.value})
    controller.update(shaped.kl, len(batch))
    return batch.replace(rewards=shaped.rewards)


def correct(batch: Batch, config: Any, record: StepRecord) -> Batch:
    """Weights and rejections for rollouts of a slightly other policy."""
    settings = correction_of(config)
    if batch.old_log_probs is None or batch.rollout_log_probs is None or not bool(batch.mask.any()) or settings.bypass_mode:
        return batch
    correction = correct_rollout(
        batch.old_log_probs,
        batch.rollout_log_probs,
        batch.mask,
        rollout_is=settings.rollout_is,
        rollout_is_threshold=settings.rollout_is_threshold,
        rollout_is_batch_normalize=settings.rollout_is_batch_normalize,
        rollout_rs=settings.rollout_rs,
        rollout_rs_threshold=settings.rollout_rs_threshold,
    )
    record.add({name: float(value) for name, value in correction.metrics.items()})
    return batch.replace(rollout_weights=correction.weights, mask=correction.mask)


def add_advantages(batch: Batch, config: Any, trajectories: Sequence[Trajectory]) -> Batch:
    """Advantages by the configured estimator. `trajectories` are the rows of the batch.

    The estimator sees samples that have a score and, where it compares samples of one prompt, at least the peers it asks for.
    The others have advantage 0: a missing score must move nobody's baseline.
    """
    peers = Counter(t.group for t in trajectories if t.score is not None)
    least = ADVANTAGES.entry(config.algorithm.adv_estimator).facts["min_group"]
    rows = [row for row, t in enumerate(trajectories) if t.score is not None and peers[t.group] >= least]
    if len(rows) == len(batch):
        result = _estimated(batch, config, trajectories)
        return batch.replace(advantages=result.advantages, returns=result.returns)
    advantages, returns = torch.zeros_like(batch.mask), torch.zeros_like(batch.mask)
    if rows:
        result = _estimated(batch.select(rows), config, [trajectories[row] for row in rows])
        advantages[rows] = pad_columns(result.advantages.to(advantages.dtype), batch.mask.shape[1])
        returns[rows] = pad_columns(result.returns.to(returns.dtype), batch.mask.shape[1])
    return batch.replace(advantages=advantages, returns=returns)


def _estimated(batch: Batch, config: Any, trajectories: Sequence[Trajectory]) -> AdvantageResult:
    """The estimator, given whatever it names."""
    algorithm = config.algorithm
    weights = algorithm.gdpo_reward_weights
    return estimate(
        algorithm.adv_estimator,
        rewards=batch.rewards,
        mask=batch.mask,
        groups=torch.unique(batch.groups, return_inverse=True)[1],
        values=batch.values,
        reward_baselines=batch.baselines,
        old_log_probs=batch.old_log_probs,
        sum_pi_squared=batch.sum_pi_squared,
        rollout_is_weights=batch.rollout_weights,
        reward_components=reward_components(trajectories, algorithm.gdpo_reward_keys),
        component_weights=None if weights is None else torch.tensor(weights),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        normalisation="whiten" if algorithm.norm_adv_by_std else "centre",
        compat=None if algorithm.compat == "strop" else algorithm.compat,
    )


def reward_components(trajectories: Sequence[Trajectory], keys: Sequence[str] | None) -> torch.Tensor | None:
    """[B, C]: the named parts of each score, as the scorer reported them."""
    if not keys:
        return None
    table = torch.zeros(len(trajectories), len(keys), dtype=torch.float64)
    for row, trajectory in enumerate(trajectories):
        reported = {"score": trajectory.score, **trajectory.extras}
        for column, key in enumerate(keys):
            value = reported.get(key)
            if not isinstance(value, bool | int | float):
                raise ValueError(
                    f"algorithm.gdpo_reward_keys names {key!r}, but the scorer of {trajectory.prompt.data_source} reports "
                    f"{value!r} for it (it gives {', '.join(reported)}). Return a number under that key."
                )
            table[row, column] = float(value)
    return table


def resample(batch: Batch, config: Any, step: int, record: StepRecord) -> Batch:
    """PF-PPO: the rows to learn from, drawn by score with replacement. Failed samples are never drawn."""
    settings = config.algorithm.pf_ppo
    usable = batch.mask.any(-1).nonzero().squeeze(-1)
    if not config.algorithm.use_pf_ppo or not len(usable):
        return batch
    assert batch.scores is not None
    weights = torch.zeros(len(batch), dtype=torch.float64)
    scores = batch.scores[usable].double().sum(-1)
    weights[usable] = pf_ppo_weights(scores, method=settings.reweight_method, power=settings.weight_pow)
    generator = torch.Generator().manual_seed(stream_seed(RESAMPLING_STREAM, config.trainer.seed, step))
    rows = resample_rows(weights, generator=generator)
    record.add({"pf_ppo/rows_drawn": len(torch.unique(rows)) / len(batch)})
    return batch.select(rows)
