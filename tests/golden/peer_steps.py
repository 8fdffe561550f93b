"""One training step of each framework, from raw scores to the policy loss, as loops over Python numbers.

Written from the published formulas, not from Strop's code. OpenRLHF: length penalties, then the group baseline, the clip, the
KL charged per token with the score on the last action token, returns with gamma 1 for group estimators, population variance.
verl: the KL is subtracted from token scores first, estimators see the shaped rewards, whitening with n - 1, scores stay where
they are even on a masked token. TRL: scores standardised by group with 1e-4, KL only in the loss, rows averaged, empty or not.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

Rows = list[list[float]]
WIDTH = 6


@dataclass(frozen=True)
class Expected:
    advantages: Rows
    loss: float


@dataclass(frozen=True)
class Step:
    compat: str
    overrides: tuple[str, ...]
    peer: Callable[[Step], Expected]
    frozen: float
    """The loss that the loops give, so that nobody changes them unseen."""
    seed: int
    mask: list[list[int]]
    scale: float = 1.0
    """Spread of the scores."""
    reference_gap: float = 0.3
    """Spread of the log-ratio to the reference."""
    critic: bool = False
    settings: dict[str, float | str] = field(default_factory=dict)
    """What the loops need to know: gamma, lam, coefficients, clips."""
    groups: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    old: Rows = field(default_factory=list)
    new: Rows = field(default_factory=list)
    reference: Rows = field(default_factory=list)
    values: Rows | None = None
    width: int = WIDTH


FULL = [1, 1, 1, 1, 1, 1]
HOLES = [[1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 0], FULL, [1, 1, 1, 0, 0, 0]]
EMPTY = [FULL, [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
TOOL_END = [[1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 0], FULL, [1, 1, 1, 0, 1, 1]]


def step_of(name: str) -> Step:
    """A step with its random inputs, the same on every machine."""
    step = STEPS[name]
    draw = random.Random(step.seed)

    def table(spread: float, around: Rows | None = None) -> Rows:
        rows = []
        for i in range(len(step.mask)):
            rows.append(
                [(around[i][t] if around else -1.5) + spread * draw.uniform(-1, 1) for t in range(WIDTH)]
            )
        return rows

    old = table(1.0)
    filled = {
        "groups": [i // 2 for i in range(len(step.mask))],
        "scores": [step.scale * draw.uniform(-1, 1) for _ in step.mask],
        "old": old,
        "new": table(0.4, old),
        "reference": table(step.reference_gap, old),
        "values": table(1.0) if step.critic else None,
    }
    return dataclasses.replace(step, **filled)  # type: ignore[arg-type]


def number(step: Step, name: str, default: float = 0.0) -> float:
    return float(step.settings.get(name, default))


# --- parts ---------------------------------------------------------------------------------------------------


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float]) -> float:
    """With n - 1."""
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


def members(step: Step, i: int) -> list[int]:
    return [j for j, group in enumerate(step.groups) if group == step.groups[i]]


def trained(step: Step, rows: Rows) -> list[float]:
    return [rows[i][t] for i, mask in enumerate(step.mask) for t, on in enumerate(mask) if on]


def on_tokens(step: Step, rows: Rows) -> Rows:
    return [[rows[i][t] * on for t, on in enumerate(mask)] for i, mask in enumerate(step.mask)]


def k3(new: float, reference: float) -> float:
    gap = reference - new
    return math.exp(gap) - gap - 1.0


def limited(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def clipped_losses(
    step: Step, advantages: Rows, *, dual: float | None, cispo_cap: float | None = None
) -> Rows:
    """The loss of each token: PPO's clip of 0.2, verl's dual clip, or TRL's CISPO."""
    losses = []
    for i in range(len(step.mask)):
        line = []
        for t in range(WIDTH):
            a, ratio = advantages[i][t], math.exp(step.new[i][t] - step.old[i][t])
            if cispo_cap is not None:
                line.append(-min(ratio, cispo_cap) * a * step.new[i][t])
                continue
            value = max(-a * ratio, -a * limited(ratio, 0.8, 1.2))
            if dual is not None and a < 0:
                value = min(value, -a * dual)
            line.append(value)
        losses.append(line)
    return losses


def add_kl(step: Step, losses: Rows, coef: float, limit: float) -> Rows:
    return [
        [losses[i][t] + coef * min(k3(step.new[i][t], step.reference[i][t]), limit) for t in range(WIDTH)]
        for i in range(len(step.mask))
    ]


def token_mean(step: Step, losses: Rows) -> float:
    return mean(trained(step, losses))


def row_means(step: Step, losses: Rows) -> list[float]:
    """The mean loss of each row, 0 for an empty one."""
    found = []
    for i, mask in enumerate(step.mask):
        found.append(sum(losses[i][t] for t, on in enumerate(mask) if on) / max(sum(mask), 1))
    return found


# --- OpenRLHF ------------------------------------------------------------------------------------------------


def openrlhf(step: Step) -> Expected:
    kind = str(step.settings["estimator"])
    shaped = []
    for i, score in enumerate(step.scores):
        group = [step.scores[j] for j in members(step, i)]
        others = [step.scores[j] for j in members(step, i) if j != i]
        if kind == "rloo":
            score = score - mean(others)
        elif kind == "reinforce_baseline":
            score = score - mean(group)
        elif kind == "group_norm":
            score = (score - mean(group)) / (deviation(group) + 1e-9)
        shaped.append(limited(score, -number(step, "clip", 10.0), number(step, "clip", 10.0)))
    gamma = number(step, "gamma", 1.0)
    lam = number(step, "lam", 1.0)
    advantages: Rows = []
    for i, mask in enumerate(step.mask):
        last = max(t for t, on in enumerate(mask) if on)
        rewards = []
        for t, on in enumerate(mask):
            kl = limited(step.old[i][t] - step.reference[i][t], -10.0, 10.0)
            reward = -number(step, "kl_coef") * kl + (shaped[i] if t == last else 0.0)
            rewards.append(reward * on)
        line = [0.0] * WIDTH
        running = 0.0
        for t in reversed(range(WIDTH)):  # masked tokens are steps of reward 0 and value 0
            if step.values is None:
                running = rewards[t] + gamma * running
            else:
                value = step.values[i][t] * mask[t]
                following = step.values[i][t + 1] * mask[t + 1] if t + 1 < WIDTH else 0.0
                running = rewards[t] + gamma * following - value + gamma * lam * running
            line[t] = running
        advantages.append(line)
    if kind in ("gae", "reinforce_baseline"):
        every = trained(step, advantages)
        centre = mean(every)
        spread = math.sqrt(max(mean([(a - centre) ** 2 for a in every]), 1e-8))
        advantages = [[(a - centre) / spread for a in line] for line in advantages]
    losses = clipped_losses(step, advantages, dual=None)
    losses = add_kl(step, losses, number(step, "kl_loss_coef"), 10.0)
    return Expected(on_tokens(step, advantages), token_mean(step, losses))


# --- verl ----------------------------------------------------------------------------------------------------


def verl(step: Step) -> Expected:
    kind = str(step.settings["estimator"])
    gamma = number(step, "gamma", 1.0)
    lam = number(step, "lam", 1.0)
    rewards: Rows = []
    for i, mask in enumerate(step.mask):
        kl = [(step.old[i][t] - step.reference[i][t]) * on for t, on in enumerate(mask)]
        line = [-number(step, "kl_coef") * each for each in kl]
        line[-1] += step.scores[i]  # on the last response token, masked or not
        rewards.append(line)
    advantages: Rows = []
    totals = [sum(line) for line in rewards]
    for i, mask in enumerate(step.mask):
        line = [0.0] * WIDTH
        if kind == "grpo":
            group = [totals[j] for j in members(step, i)]
            line = [(totals[i] - mean(group)) / (deviation(group) + 1e-6)] * WIDTH
        else:
            running = following = 0.0
            for t in reversed(range(WIDTH)):
                if mask[t] and step.values is not None:
                    delta = rewards[i][t] + gamma * following - step.values[i][t]
                    running = delta + gamma * lam * running
                    following = step.values[i][t]
                elif mask[t]:
                    running = rewards[i][t] + gamma * running
                line[t] = running
        advantages.append(line)
    if kind != "grpo":
        every = trained(step, advantages)
        centre, spread = mean(every), math.sqrt(deviation(every) ** 2 + 1e-8)
        advantages = [[(a - centre) / spread for a in line] for line in advantages]
    advantages = on_tokens(step, advantages)
    if step.settings.get("loss") == "geo_mean":
        return Expected(
            advantages, mean([_geo_mean_row(step, advantages[i], i) for i in range(len(step.mask))])
        )
    return Expected(advantages, token_mean(step, clipped_losses(step, advantages, dual=3.0)))


def _geo_mean_row(step: Step, advantages: list[float], i: int) -> float:
    kept = [t for t, on in enumerate(step.mask[i]) if on]
    if not kept:
        return 0.0
    logs = []
    for t in kept:
        x, sign = step.new[i][t] - step.old[i][t], math.copysign(1.0, advantages[t])
        logs.append(sign * min(sign * x, sign * limited(x, -0.2, 0.2)))
    return -mean([advantages[t] for t in kept]) * math.exp(mean(logs))


# --- TRL -----------------------------------------------------------------------------------------------------


def trl(step: Step) -> Expected:
    advantages: Rows = []
    for i in range(len(step.mask)):
        group = [step.scores[j] for j in members(step, i)]
        a = step.scores[i] - mean(group)
        if step.settings.get("scale_rewards", "group") == "group":
            a /= deviation(group) + 1e-4
        advantages.append([a] * WIDTH)
    cap = step.settings.get("cispo_cap")
    losses = clipped_losses(step, advantages, dual=None, cispo_cap=None if cap is None else float(cap))
    losses = add_kl(step, losses, number(step, "beta"), math.inf)
    how = step.settings["loss_type"]
    if how == "grpo":
        loss = mean(row_means(step, losses))
    elif how == "dr_grpo":
        loss = sum(trained(step, losses)) / (len(step.mask) * step.width)
    else:
        loss = token_mean(step, losses)
    return Expected(on_tokens(step, advantages), loss)


# --- the steps -----------------------------------------------------------------------------------------------

ACTOR = "actor_rollout_ref.actor"
NO_DUAL = f"{ACTOR}.clip_ratio_c=1e9"


def _in_reward(coef: float) -> tuple[str, str]:
    return "algorithm.use_kl_in_reward=true", f"algorithm.kl_ctrl.kl_coef={coef}"


def _in_loss(coef: float) -> tuple[str, str, str]:
    return (
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_type=low_var_kl",
        f"{ACTOR}.kl_loss_coef={coef}",
    )


def _estimator(name: str) -> str:
    return f"algorithm.adv_estimator={name}"


STEPS: dict[str, Step] = {
    "openrlhf group_norm, KL in the reward, clip after the baseline": Step(
        "openrlhf",
        (_estimator("group_norm"), NO_DUAL, "reward_model.clip_range=[-0.5,0.5]", *_in_reward(0.1)),
        openrlhf,
        0.09927134909075888,
        seed=1,
        mask=HOLES,
        settings={"estimator": "group_norm", "kl_coef": 0.1, "clip": 0.5},
    ),
    "openrlhf rloo, large scores, KL in the loss": Step(
        "openrlhf",
        (_estimator("rloo"), NO_DUAL, "reward_model.clip_range=[-10,10]", *_in_loss(0.05)),
        openrlhf,
        0.41467714597518035,
        seed=2,
        mask=HOLES,
        scale=40.0,
        reference_gap=4.0,
        settings={"estimator": "rloo", "clip": 10.0, "kl_loss_coef": 0.05},
    ),
    "openrlhf reinforce_baseline, score on a tool turn": Step(
        "openrlhf",
        (_estimator("reinforce_baseline"), NO_DUAL, *_in_reward(0.02)),
        openrlhf,
        0.016350276740516333,
        seed=3,
        mask=TOOL_END,
        reference_gap=14.0,
        settings={"estimator": "reinforce_baseline", "kl_coef": 0.02},
    ),
    "openrlhf gae, gaps": Step(
        "openrlhf",
        (_estimator("gae"), NO_DUAL, "algorithm.gamma=0.97", "algorithm.lam=0.9", *_in_reward(0.05)),
        openrlhf,
        0.050222596044901806,
        seed=4,
        mask=HOLES,
        critic=True,
        settings={"estimator": "gae", "kl_coef": 0.05, "gamma": 0.97, "lam": 0.9},
    ),
    "verl gae, gaps, a lost score": Step(
        "verl",
        (_estimator("gae"), "algorithm.gamma=0.97", "algorithm.lam=0.9", *_in_reward(0.05)),
        verl,
        -0.008790728996450801,
        seed=5,
        mask=TOOL_END,
        critic=True,
        settings={"estimator": "gae", "kl_coef": 0.05, "gamma": 0.97, "lam": 0.9},
    ),
    "verl reinforce_plus_plus, gaps": Step(
        "verl",
        (_estimator("reinforce_plus_plus"), "algorithm.gamma=0.9", *_in_reward(0.1)),
        verl,
        0.01594649517596775,
        seed=6,
        mask=TOOL_END,
        settings={"estimator": "reinforce_plus_plus", "kl_coef": 0.1, "gamma": 0.9},
    ),
    "verl grpo, KL before the baseline": Step(
        "verl",
        (_estimator("grpo"), *_in_reward(0.2)),
        verl,
        0.11445610440235834,
        seed=7,
        mask=HOLES,
        settings={"estimator": "grpo", "kl_coef": 0.2},
    ),
    "verl geo_mean, an empty row": Step(
        "verl",
        (_estimator("grpo"), f"{ACTOR}.policy_loss.loss_mode=geo_mean"),
        verl,
        -0.13400027225610103,
        seed=8,
        mask=EMPTY,
        settings={"estimator": "grpo", "loss": "geo_mean"},
    ),
    "trl grpo, KL in the loss, an empty row": Step(
        "trl",
        (_estimator("grpo"), NO_DUAL, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", *_in_loss(0.1)),
        trl,
        0.6972934672102411,
        seed=9,
        mask=EMPTY,
        scale=0.001,
        reference_gap=4.0,
        settings={"loss_type": "grpo", "beta": 0.1},
    ),
    "trl dr_grpo, an empty row": Step(
        "trl",
        (_estimator("dr_grpo"), NO_DUAL, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"),
        trl,
        0.050216767971099474,
        seed=10,
        mask=EMPTY,
        settings={"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "trl cispo": Step(
        "trl",
        (
            _estimator("grpo"),
            f"{ACTOR}.policy_loss.loss_mode=cispo",
            f"{ACTOR}.clip_ratio_low=0.2",
            f"{ACTOR}.clip_ratio_high=1.1",
        ),
        trl,
        -0.10436657627956185,
        seed=11,
        mask=HOLES,
        settings={"loss_type": "cispo", "cispo_cap": 1.1},
    ),
}
