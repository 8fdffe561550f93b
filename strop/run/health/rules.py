"""The health rules: each reads the metrics history and returns what is wrong, or None.

The limits are calibrated on the recorded runs of tests/run/health_runs: no rule fires on a healthy one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from strop.run.health.history import (
    GAINED,
    SETTLED,
    History,
    RuleFinding,
    gained,
    idle_device,
    memory_growth,
    reached,
    rising,
    stalled_phase,
)
from strop.run.health.mismatch import first_step_mismatch, rollout_mismatch

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

ENTROPY_LEFT = 0.15
ENTROPY_LEFT_FOR_NOTHING = 0.3
"""Share of the first entropy below which it has collapsed: where scores rose, and where they did not."""
NOT_SOLVED = 0.8
"""Share of the reachable score below which certainty is premature."""
KL_LIMIT = 1.0
"""Nats per token between the policy and its reference."""
UPDATE_KL_LIMIT = 0.2
"""Nats per token between the policy before and after the updates of one step."""
TRUNCATED_LIMIT = 0.5
LONGER = 2.5
SHORTER = 0.3
"""Factors of the first mean length."""
FLAT_GROUPS_LIMIT = 0.9
SATURATED = 0.98
"""Share of the reachable score above which nothing is left to learn."""
COMPONENT_FALL = 0.3
"""Share of its first value that a component lost."""
FALLEN_SCORE = 0.5
"""Share of the best score, above the first one, that was lost again."""
CLIPPED_LIMIT = 0.3
SPIKE = 12.0
"""Factor of the usual gradient norm."""
HARMFUL_CRITIC = -0.5
USELESS_CRITIC = 0.01
"""Explained variance: below the first the critic misleads; below the second, after PATIENCE steps, it has
learned nothing."""
PATIENCE = 30

Look = Callable[[History], RuleFinding | None]


@dataclass(frozen=True)
class Rule:
    """A health rule: how to find a problem, how severe it is, and what to try."""

    name: str
    severity: str
    """warning: look at it soon; error: what is learned from here on is worth little."""
    look: Look
    advice: str


def entropy_collapse(history: History) -> RuleFinding | None:
    """Entropy fell while scores are far from the best."""
    now = history.recent("actor/entropy")
    then = history.first("actor/entropy")
    score = reached(history)
    if now is None or then is None or history.steps < SETTLED or then <= 0:
        return None
    if (score is not None and score > NOT_SOLVED) or rising(history):  # low because the policy is right
        return None
    share = ENTROPY_LEFT if gained(history) >= GAINED else ENTROPY_LEFT_FOR_NOTHING
    if now > share * then:
        return None
    return RuleFinding(
        f"Entropy fell from {then:.3g} to {now:.3g} while scores are far from the best seen: the policy "
        "repeats itself without having solved the task.",
        {"actor/entropy": now, "first": then},
    )


def kl_runaway(history: History) -> RuleFinding | None:
    """The policy moves too far from its reference, or too far in one step."""
    for name in ("actor/kl_loss", "actor/reward_kl_penalty"):
        now = history.recent(name)
        if now is not None and now > KL_LIMIT:
            return RuleFinding(
                f"The policy is {now:.3g} nats per token away from its reference.", {name: now}
            )
    jump = history.recent("actor/ppo_kl")
    if jump is not None and jump > UPDATE_KL_LIMIT:
        return RuleFinding(
            f"The updates of one step move the policy by {jump:.3g} nats per token from what was sampled.",
            {"actor/ppo_kl": jump},
        )
    return None


def truncation(history: History) -> RuleFinding | None:
    """Many responses reach the token limit."""
    share = history.recent("response_length/clip_ratio")
    if share is None or share < TRUNCATED_LIMIT:
        return None
    return RuleFinding(
        f"{share:.0%} of the responses are cut off at the limit of tokens.",
        {"response_length/clip_ratio": share},
    )


def length_drift(history: History) -> RuleFinding | None:
    """Responses became much longer or shorter."""
    now = history.recent("response_length/mean")
    then = history.first("response_length/mean")
    if now is None or then is None or then <= 0 or history.steps < SETTLED:
        return None
    if SHORTER * then < now < LONGER * then:
        return None
    return RuleFinding(
        f"Responses have {now:.4g} tokens on average; they had {then:.4g} at the beginning.",
        {"response_length/mean": now, "first": then},
    )


def zero_variance(history: History) -> RuleFinding | None:
    """All samples of most groups have the same score."""
    share = history.recent("critic/zero_variance_groups")
    score = reached(history)
    if share is None or share < FLAT_GROUPS_LIMIT or (score is not None and score >= NOT_SOLVED):
        return None
    return RuleFinding(
        f"In {share:.0%} of the groups all responses earn the same, so there is hardly anything to compare.",
        {"critic/zero_variance_groups": share},
    )


def reward_saturation(history: History) -> RuleFinding | None:
    """Scores are as high as they can be."""
    score = reached(history)
    share = history.recent("critic/zero_variance_groups", SETTLED)
    if score is None or score < SATURATED or share is None or share < FLAT_GROUPS_LIMIT:
        return None
    return RuleFinding(
        f"Scores reach {score:.1%} of the best there is, and {share:.0%} of the groups agree: nothing is "
        "left to learn here.",
        {"reached": score, "critic/zero_variance_groups": share},
    )


def reward_hacking(history: History) -> RuleFinding | None:
    """The score rises through one reward component while another falls."""
    score = history.recent("critic/score/mean")
    first = history.first("critic/score/mean")
    if score is None or first is None or history.steps < SETTLED or score <= first:
        return None
    known: dict[str, tuple[float, float]] = {}
    fallen: list[str] = []
    risen: list[str] = []
    for name in _components(history):
        then = history.first(name)
        now = history.recent(name)
        if then is None or now is None or (then, now) == (first, score):  # the score under another name: acc
            continue
        known[name] = (then, now)
        if then > 0 and now < (1 - COMPONENT_FALL) * then:
            fallen.append(name)
        if now > then and now - then >= (score - first) / 2:
            risen.append(name)
    if not fallen or not risen:
        return None
    up = risen[0]
    down = fallen[0]
    return RuleFinding(
        f"The score rises by {up.split('/')[1]!r} ({known[up][0]:.3g} to {known[up][1]:.3g}) while "
        f"{down.split('/')[1]!r} falls ({known[down][0]:.3g} to {known[down][1]:.3g}).",
        {up: known[up][1], down: known[down][1]},
    )


def _components(history: History) -> list[str]:
    return [name for name in history.names("reward/", "/mean") if name != "reward/score/mean"]


def reward_collapse(history: History) -> RuleFinding | None:
    """The mean score fell far below its best."""
    now = history.recent("critic/score/mean")
    first = history.first("critic/score/mean")
    best = history.best("critic/score/mean")
    span = history.range("critic/score/min", "critic/score/max")
    if now is None or first is None or best is None or span is None or history.steps < SETTLED:
        return None
    floor = span[0]
    if best <= floor or now - floor > FALLEN_SCORE * (best - floor) or best - now < 0.1 * (span[1] - floor):
        return None
    return RuleFinding(
        f"The mean score was {best:.3g} and is {now:.3g}.", {"critic/score/mean": now, "best": best}
    )


def clip_fraction(history: History) -> RuleFinding | None:
    """Many tokens are clipped in the policy loss."""
    share = history.recent("actor/pg_clipfrac")
    if share is None or share < CLIPPED_LIMIT:
        return None
    return RuleFinding(
        f"{share:.0%} of the tokens are clipped, so they teach nothing.", {"actor/pg_clipfrac": share}
    )


def gradient_spike(history: History) -> RuleFinding | None:
    """A gradient norm is not finite, or far above the usual one."""
    for role in ("actor", "critic", "train"):
        if any(history.last(f"{role}/skipped_updates", 1)):
            return RuleFinding(
                f"Gradients of the {role} were not finite; those updates were skipped.",
                {f"{role}/skipped_updates": 1},
            )
        norms = history.last(f"{role}/grad_norm", 21)
        if len(norms) < SETTLED:
            continue
        usual = median(norms[:-1])
        if usual > 0 and norms[-1] > SPIKE * usual and norms[-1] > SPIKE / 2 * max(norms[-SETTLED:-1]):
            return RuleFinding(
                f"The gradient norm of the {role} is {norms[-1]:.3g}; {usual:.3g} is usual.",
                {f"{role}/grad_norm": norms[-1], "usual": usual},
            )
    return None


def value_failure(history: History) -> RuleFinding | None:
    """The critic explains nothing, or less than nothing."""
    explained = history.recent("critic/vf_explained_var", SETTLED)
    spread = history.range("critic/returns/min", "critic/returns/max")
    if explained is None or spread is None or spread[0] == spread[1]:
        return None
    if explained < HARMFUL_CRITIC:
        meaning = "it is worse than guessing the mean, and misleads the actor"
    elif history.steps >= PATIENCE and explained < USELESS_CRITIC:
        meaning = "it has learned nothing about the returns"
    else:
        return None
    return RuleFinding(
        f"The critic explains {explained:.2f} of the variance of returns: {meaning}.",
        {"critic/vf_explained_var": explained},
    )


RULES = (
    Rule(
        "entropy_collapse",
        "error",
        entropy_collapse,
        f"Lower {ACTOR}.optim.lr, raise {ACTOR}.entropy_coeff a little (0.001) and see that it is not "
        f"negative, widen {ACTOR}.clip_ratio_high (0.28), or sample at a higher {ROLLOUT}.temperature.",
    ),
    Rule(
        "kl_runaway",
        "error",
        kl_runaway,
        f"Lower {ACTOR}.optim.lr or {ACTOR}.ppo_epochs; raise {ACTOR}.kl_loss_coef or "
        "algorithm.kl_ctrl.kl_coef; read samples: text far from the reference is often broken.",
    ),
    Rule(
        "truncation",
        "warning",
        truncation,
        "Raise data.max_response_length, or shape lengths (reward_model.overlong_buffer); check that the "
        "model knows its end token and that the chat template asks for an answer.",
    ),
    Rule(
        "length_drift",
        "warning",
        length_drift,
        "Read samples. Growth with rising validation is reasoning; growth without it is padding: use "
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm (dr_grpo) or reward_model.overlong_buffer. Shrinking "
        "responses often mean that thinking is not rewarded.",
    ),
    Rule(
        "zero_variance_groups",
        "error",
        zero_variance,
        "Check that the scorer tells good from bad responses (strop eval), use easier or harder prompts, "
        f"raise {ROLLOUT}.n, or set algorithm.filter_groups.enable=true.",
    ),
    Rule(
        "reward_saturation",
        "warning",
        reward_saturation,
        "Stop here, or go on with harder prompts (data.train_files, algorithm.filter_groups).",
    ),
    Rule(
        "reward_hacking",
        "error",
        reward_hacking,
        "Read the best-scored samples. Lower the weight of the part that rises, make it count only when the "
        f"other is right, or hold the policy closer to its reference ({ACTOR}.use_kl_loss).",
    ),
    Rule(
        "reward_collapse",
        "error",
        reward_collapse,
        f"Go back to an earlier checkpoint with a lower {ACTOR}.optim.lr, more prompts per step, or a KL "
        "term.",
    ),
    Rule(
        "clip_fraction",
        "warning",
        clip_fraction,
        f"Lower {ACTOR}.optim.lr or {ACTOR}.ppo_epochs, or raise {ACTOR}.ppo_mini_batch_size so that a step "
        "makes fewer updates.",
    ),
    Rule(
        "gradient_spike",
        "warning",
        gradient_spike,
        "Look at the samples of this step for an odd score or length; lower the learning rate or "
        f"{ACTOR}.grad_clip (critic.grad_clip; in supervised training optim.clip_grad); bound the scores.",
    ),
    Rule(
        "value_failure",
        "warning",
        value_failure,
        "Check critic.optim.lr (1e-5 is usual, never 0), train the critic alone first "
        "(trainer.critic_warmup), start it from a reward model, or use an estimator without a critic (grpo, "
        "rloo).",
    ),
    Rule(
        "rollout_mismatch",
        "error",
        rollout_mismatch,
        f"See that the engine gets new weights and the same temperature and precision ({ROLLOUT}.dtype); "
        "else correct for it (algorithm.rollout_correction.rollout_is=token), which is also the cure for "
        "rollouts that run ahead.",
    ),
    Rule(
        "first_step_mismatch",
        "error",
        first_step_mismatch,
        f"Stop and run one step with {ROLLOUT}.name=hf: if the difference goes away, the engine computes the "
        f"model otherwise than transformers. Compare {ROLLOUT}.temperature, {ROLLOUT}.dtype and "
        f"{ACTOR}.fsdp_config.dtype, and see that the engine loaded actor_rollout_ref.model.path.",
    ),
    Rule(
        "idle_device",
        "warning",
        idle_device,
        "`strop profile RUN` says where the time goes. Score in more processes (reward_model.num_workers), "
        "serve the reward model elsewhere, give tools a shorter time limit, or let rollouts run ahead "
        "(trainer.async_training).",
    ),
    Rule(
        "memory_growth",
        "warning",
        memory_growth,
        "Something is kept from step to step, most often by a scorer or a tool of your own (lists, caches, "
        "logs). Save more often until it is found.",
    ),
    Rule(
        "stalled_phase",
        "warning",
        stalled_phase,
        "`strop doctor RUN` shows what every process is doing while it hangs. Slow disks, remote rewards and "
        "tools are the usual causes.",
    ),
)
