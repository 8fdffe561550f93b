"""Adds to a batch what the losses need: log-probs, values, rewards with a KL penalty, advantages.

Each function takes a batch and returns one with further tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from strop.algorithms.advantages.base import AdvantageResult, Estimator, Normalisation, estimate
from strop.algorithms.advantages.returns import reinforce
from strop.algorithms.distillation import discounted_gain, teacher_gain
from strop.algorithms.kl import KLController
from strop.algorithms.metrics.training import StepRecord, probability_drift
from strop.algorithms.reward_shaping import kl_in_reward, on_last_trained
from strop.algorithms.rollout_correction import correct_rollout
from strop.backends.base import Backend, MicroBatching, Outputs
from strop.backends.micro_batches import NonFiniteLoss, suspects
from strop.catalog import ADVANTAGES
from strop.compat import Conventions, conventions
from strop.config.derived import (
    estimator_needs,
    has_task_reward,
    needs_old_log_probs,
    rollout_correction,
    uses_engine_log_probs,
)
from strop.config.hyperparameters import advantage_kwargs
from strop.config.schema.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from strop.config.schema.distillation import DistillationConfig
from strop.config.schema.ppo import PpoConfig
from strop.ppo.episodes.rows import (
    added_rewards,
    first_rows,
    of_all_rows,
    rewards_by_episode,
    spread_over_rows,
)
from strop.ppo.episodes.turn_credit import add_turn_credit
from strop.types import Batch, Trajectory, pad_columns


@dataclass(frozen=True)
class ExperienceFacts:
    """What the configuration says about the experience of every step; it does not change during a run."""

    needs_old_log_probs: bool
    """Log-probs must be known before the update. On-policy, those of the update itself are used."""
    old_from_engine: bool
    """The old log-probs are those that the rollout engine reported."""
    needs_sum_pi_squared: bool
    needs_entropy: bool
    """The estimator reads the entropy of each token."""
    records_experts: bool
    has_task_reward: bool
    """Scores are trained on."""
    correction: RolloutCorrectionConfig
    estimator: Estimator
    """The function of algorithm.adv_estimator."""
    estimator_kwargs: Mapping[str, object]
    """algorithm.adv_kwargs."""
    min_group: int
    """Samples with a score that a prompt needs, so that the estimator can compare them."""
    rules: Conventions
    """Of algorithm.compat."""
    score_baseline: str | None
    """The baseline is subtracted from the scores before the KL is charged: "plain", or "whitened" if the
    advantages are normalised over the batch afterwards. None: the estimator reads token rewards."""
    compares_episodes: bool
    """The estimator compares the rewards of a prompt's samples: it sees an episode once, with all of its
    sequences. With `score_baseline`, `shape_rewards` has compared them."""
    credit: str
    """rollout.agent.credit."""
    reward_clip: tuple[float, float] | None
    """Limits of the scores, where they apply after the baseline. Else the scorer applies them."""

    @staticmethod
    def of(config: PpoConfig, on_policy: bool) -> ExperienceFacts:
        actor = config.actor_rollout_ref.actor
        algorithm = config.algorithm
        entry = ADVANTAGES.entry(algorithm.adv_estimator)
        rules = conventions(algorithm.compat)
        limits = config.reward_model.clip_range
        reward_clip = None
        if limits is not None and rules.reward_clip == "after the baseline":
            reward_clip = (limits[0], limits[1])
        score_baseline = None
        if rules.group_baseline == "before the KL":
            score_baseline = entry.facts["score_baseline"]
        return ExperienceFacts(
            needs_old_log_probs=needs_old_log_probs(config, on_policy),
            old_from_engine=uses_engine_log_probs(config),
            needs_sum_pi_squared=actor.calculate_sum_pi_squared
            or "sum_pi_squared" in estimator_needs(config),
            needs_entropy="entropy" in estimator_needs(config),
            records_experts=actor.router_replay.mode == "R2",
            has_task_reward=has_task_reward(config),
            correction=rollout_correction(config),
            estimator=entry.load(),
            estimator_kwargs=advantage_kwargs(config).converted(),
            min_group=entry.facts["min_group"],
            rules=rules,
            score_baseline=score_baseline,
            compares_episodes="group" in entry.facts["needs"] and score_baseline is None,
            credit=config.actor_rollout_ref.rollout.agent.credit,
            reward_clip=reward_clip,
        )


def add_old_log_probs(
    batch: Batch, actor: Backend, facts: ExperienceFacts, micro: MicroBatching, record: StepRecord
) -> Batch:
    """Log-probs under the weights that the step began with: recomputed, or those of the engine."""
    want = []
    if not facts.old_from_engine:
        want += ["log_probs", "entropy"]
    elif facts.needs_entropy:
        want.append("entropy")
    if facts.needs_sum_pi_squared:
        want.append("sum_pi_squared")
    if facts.records_experts:
        want.append("experts")
    outputs = actor.forward(batch, want, micro) if want else Outputs()
    found = {name: getattr(outputs, name) for name in want if name != "log_probs"}
    if outputs.entropy is not None:
        entropy = (outputs.entropy * batch.mask).sum() / batch.mask.sum().clamp(min=1)
        record.add({"actor/entropy": float(entropy)})
    if facts.old_from_engine:
        return batch.replace(old_log_probs=batch.rollout_log_probs, **found)
    assert outputs.log_probs is not None
    record.add(rollout_drift(batch, outputs.log_probs))
    return batch.replace(old_log_probs=outputs.log_probs, **found)


def rollout_drift(batch: Batch, log_probs: torch.Tensor) -> dict[str, float]:
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
    """Log-probs under the reference model."""
    return batch.replace(ref_log_probs=reference.forward(batch, ["log_probs"], micro).log_probs)


def add_values(batch: Batch, critic: Backend, micro: MicroBatching) -> Batch:
    """Values of the critic, 0 outside the mask."""
    values = critic.forward(batch, ["values"], micro).values
    assert values is not None
    return batch.replace(values=values * batch.mask)


def refuse_nonfinite(batch: Batch) -> None:
    """Raise NonFiniteLoss when a model gave NaN or infinity for a token that would be trained."""
    rows, causes = suspects(batch, {})
    if rows:
        assert batch.row_ids is not None
        raise NonFiniteLoss([int(batch.row_ids[row]) for row in rows], causes, float("nan"))


def shape_rewards(
    batch: Batch,
    algorithm: AlgorithmConfig,
    facts: ExperienceFacts,
    trajectories: Sequence[Trajectory],
    controller: KLController,
    record: StepRecord,
) -> Batch:
    """Rewards: the scores, minus a KL penalty to the reference if algorithm.use_kl_in_reward is set."""
    scores = batch.scores
    if facts.rules.reward_place == "last trained token":
        scores = _terminal_rewards(batch, algorithm, facts, trajectories)
    if not algorithm.use_kl_in_reward:
        return batch.replace(rewards=scores)
    assert scores is not None and batch.old_log_probs is not None and batch.ref_log_probs is not None
    shaped = kl_in_reward(
        scores,
        batch.old_log_probs,
        batch.ref_log_probs,
        batch.mask,
        coef=controller.value,
        estimator=algorithm.kl_penalty,
        rules=facts.rules,
    )
    record.add({"actor/reward_kl_penalty": shaped.kl, "actor/reward_kl_penalty_coeff": controller.value})
    controller.update(shaped.kl, len(batch))
    return batch.replace(rewards=shaped.rewards)


def _terminal_rewards(
    batch: Batch, algorithm: AlgorithmConfig, facts: ExperienceFacts, trajectories: Sequence[Trajectory]
) -> torch.Tensor:
    """One reward per row on its last trained token: the score, minus the baseline of its group if the
    estimator has one, within `facts.reward_clip`."""
    assert batch.scores is not None
    scores = batch.scores.double().sum(-1)
    if facts.score_baseline is not None:
        compared = torch.zeros_like(scores)
        rows = rows_to_compare(trajectories, facts.min_group)
        if batch.episodes is not None:
            scores = scores + added_rewards(scores, batch.episodes, trajectories)
            rows = sorted(set(rows) & set(first_rows(batch.episodes).tolist()))
        if rows:
            groups = torch.unique(batch.groups[rows], return_inverse=True)[1]
            compared[rows] = _compare(scores[rows], groups, algorithm, facts).to(compared.dtype)
        if batch.episodes is not None:
            compared = of_all_rows(compared[first_rows(batch.episodes)], batch.episodes, facts.credit)
        scores = compared
    if facts.reward_clip is not None:
        scores = scores.clamp(*facts.reward_clip)
    return on_last_trained(scores.to(batch.scores.dtype), batch.mask)


def correct_off_policy(batch: Batch, facts: ExperienceFacts, record: StepRecord) -> Batch:
    """Importance weights and rejections where the rollout policy differs from the trained one."""
    settings = facts.correction
    if batch.old_log_probs is None or batch.rollout_log_probs is None:
        return batch
    if facts.old_from_engine or not bool(batch.mask.any()):  # there is nothing to compare
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
    if settings.rollout_rs and facts.rules.rejection == "zero weight":
        weights = correction.mask.to(batch.mask.dtype)
        if correction.weights is not None:
            weights = weights * correction.weights
        return batch.replace(rollout_weights=weights)
    return batch.replace(rollout_weights=correction.weights, mask=correction.mask)


def add_advantages(
    batch: Batch, algorithm: AlgorithmConfig, facts: ExperienceFacts, trajectories: Sequence[Trajectory]
) -> Batch:
    """Advantages and returns of the configured estimator. `trajectories` are the rows of the batch.

    The estimator sees samples that have a score and whose prompt has at least `facts.min_group` of them. All
    other rows get advantage 0, so a missing score changes no baseline.
    """
    found = _add_advantages(batch, algorithm, facts, trajectories)
    if facts.credit != "turn" or not facts.compares_episodes or not facts.has_task_reward:
        return found
    heads = range(len(batch)) if batch.episodes is None else first_rows(batch.episodes).tolist()
    comparable = rows_to_compare([trajectories[row] for row in heads], facts.min_group)

    def compare(sums: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return _compare(sums, groups, algorithm, facts)

    return add_turn_credit(found, trajectories, comparable, compare)


def _compare(
    sums: torch.Tensor, groups: torch.Tensor, algorithm: AlgorithmConfig, facts: ExperienceFacts
) -> torch.Tensor:
    """Advantages of sums of rewards [R], compared within `groups` [R]."""
    result = estimate(
        facts.estimator,
        rewards=sums[:, None],
        mask=torch.ones(len(sums), 1),
        groups=groups,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        normalisation="none",
        eps=facts.rules.group_eps,
        hyperparameters=facts.estimator_kwargs,
    )
    return result.advantages[:, 0]


def _add_advantages(
    batch: Batch, algorithm: AlgorithmConfig, facts: ExperienceFacts, trajectories: Sequence[Trajectory]
) -> Batch:
    """The same with one advantage for all turns of an episode."""
    if batch.episodes is not None and facts.compares_episodes:
        return _advantages_of_episodes(batch, algorithm, facts, trajectories)
    rows: list[int] = []
    if facts.has_task_reward:
        rows = rows_to_compare(trajectories, facts.min_group)
    if rows and len(rows) == len(batch):
        result = _estimate(batch, algorithm, facts, trajectories)
        return batch.replace(advantages=result.advantages, returns=result.returns)
    advantages = torch.zeros_like(batch.mask)
    returns = torch.zeros_like(batch.mask)
    if rows:
        result = _estimate(batch.select(rows), algorithm, facts, [trajectories[row] for row in rows])
        advantages[rows] = pad_columns(result.advantages.to(advantages.dtype), batch.mask.shape[1])
        returns[rows] = pad_columns(result.returns.to(returns.dtype), batch.mask.shape[1])
    return batch.replace(advantages=advantages, returns=returns)


def distill(batch: Batch, settings: DistillationConfig, record: StepRecord) -> Batch:
    """The advantages with the teacher's term, where it is a reward."""
    if batch.teacher_log_probs is None or not settings.use_policy_gradient:
        return batch
    assert batch.old_log_probs is not None and batch.advantages is not None
    gain = teacher_gain(
        batch.old_log_probs, batch.teacher_log_probs, batch.mask, limit=settings.loss_max_clamp
    )
    tokens = batch.mask.sum().clamp(min=1)
    record.add(
        {
            "distillation/reverse_kl": float(-gain.sum() / tokens),
            "distillation/teacher_log_prob": float((batch.teacher_log_probs * batch.mask).sum() / tokens),
        }
    )
    term = settings.coef * discounted_gain(gain, batch.mask, discount=settings.discount)
    return batch.replace(advantages=batch.advantages + term.to(batch.advantages))


def _advantages_of_episodes(
    batch: Batch, algorithm: AlgorithmConfig, facts: ExperienceFacts, trajectories: Sequence[Trajectory]
) -> Batch:
    """The estimator sees the first sequence of each episode, with all rewards of the episode; all sequences
    get its advantage (episodes/rows.py)."""
    assert batch.episodes is not None
    heads = first_rows(batch.episodes).tolist()
    first = rewards_by_episode(batch, trajectories)
    found = _add_advantages(first, algorithm, facts, [trajectories[row] for row in heads])
    assert found.advantages is not None and found.returns is not None
    return batch.replace(
        advantages=spread_over_rows(found.advantages, first.mask, batch, facts.credit),
        returns=spread_over_rows(found.returns, first.mask, batch, facts.credit),
    )


def rows_to_compare(trajectories: Sequence[Trajectory], min_group: int) -> list[int]:
    """Rows that have a score and whose prompt has at least `min_group` of them."""
    peers = Counter(t.group for t in trajectories if t.score is not None)
    return [row for row, t in enumerate(trajectories) if t.score is not None and peers[t.group] >= min_group]


def _estimate(
    batch: Batch, algorithm: AlgorithmConfig, facts: ExperienceFacts, trajectories: Sequence[Trajectory]
) -> AdvantageResult:
    """Call the estimator. It takes those of these arguments that it names."""
    normalisation: Normalisation = "whiten" if algorithm.norm_adv_by_std else "centre"
    if facts.score_baseline is not None:  # `shape_rewards` subtracted it; what is left is a sum over tokens
        assert batch.rewards is not None
        how = normalisation if facts.score_baseline == "whitened" else "none"
        return reinforce(batch.rewards, batch.mask, normalisation=how, compat=algorithm.compat)
    weights = algorithm.gdpo_reward_weights
    return estimate(
        facts.estimator,
        rewards=batch.rewards,
        mask=batch.mask,
        groups=torch.unique(batch.groups, return_inverse=True)[1],
        values=batch.values,
        reward_baselines=batch.baselines,
        old_log_probs=batch.old_log_probs,
        sum_pi_squared=batch.sum_pi_squared,
        entropy=batch.entropy,
        rollout_is_weights=batch.rollout_weights,
        reward_components=reward_components(trajectories, algorithm.gdpo_reward_keys),
        component_weights=None if weights is None else torch.tensor(weights),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        normalisation=normalisation,
        eps=facts.rules.group_eps,
        compat=None if algorithm.compat == "strop" else algorithm.compat,
        hyperparameters=facts.estimator_kwargs,
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
                    f"algorithm.gdpo_reward_keys names {key!r}, but the scorer of "
                    f"{trajectory.prompt.data_source} reports {value!r} for it (it gives "
                    f"{', '.join(reported)}). Return a number under that key."
                )
            table[row, column] = float(value)
    return table
