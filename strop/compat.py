"""Numbers of other frameworks: the one table of what `algorithm.compat` (sft, rm, dpo: `compat`) changes.

Strop's defaults differ from verl, OpenRLHF and TRL where a difference is deliberate. The switch names a
framework whose numbers a run reproduces; `conventions` gives what that means, field by field. Code asks for
a field, never for a framework, so this file is the only place that knows who does what. The table of
docs/compat.md is `table()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

Compat = str | None
"""A value of algorithm.compat. None is "strop": our own conventions."""


POLICY = "ppo"
EVERY_TASK = "all"


def _rule(default: Any, what: str, tasks: str = POLICY) -> Any:
    """A convention with Strop's own value; for the table, what it decides and in which tasks."""
    return field(default=default, metadata={"what": what, "tasks": tasks})


@dataclass(frozen=True)
class Conventions:
    """Each field is one choice between conventions; the defaults are Strop's."""

    scorers: Literal["strop", "verl"] = _rule(
        "strop",
        "rule scorers of mathematics: answers compared by value, or with verl's text rules",
        "ppo, eval",
    )
    overlong_penalty: Literal["open", "capped"] = _rule(
        "open",
        "overlong penalty beyond max_response_length: the penalty keeps growing, or stays at penalty_factor",
    )
    reward_place: Literal["every turn", "last trained token"] = _rule(
        "every turn", "token that carries a reward: the one that earned it, or the last trained one for all"
    )
    group_baseline: Literal["after the KL", "before the KL"] = _rule(
        "after the KL",
        "group estimators compare scores minus the KL penalty, or the scores; then the KL is charged per "
        "token, and gamma is 1",
    )
    reward_clip: Literal["scores", "after the baseline"] = _rule(
        "scores", "what reward_model.clip_range limits"
    )
    kl_limit: float | None = _rule(
        None, "largest KL of a token, every estimator; None: 10 for k3, no limit for the others"
    )
    k3_exponent_limit: float = _rule(20.0, "largest log-ratio inside k3")
    group_eps: float | None = _rule(None, "added to the standard deviation of a group; None: 1e-6")
    whitening: Literal["n - 1", "n"] = _rule(
        "n - 1", "divisor of the variance of all advantages of the batch"
    )
    whitening_one_token: Literal["zero", "error"] = _rule(
        "zero", "whitening of a batch with a single trained token"
    )
    gaps: Literal["skipped", "steps"] = _rule(
        "skipped", "tokens that the policy did not sample: no time step, or a step of value 0 with a discount"
    )
    stray_rewards: Literal["moved", "lost"] = _rule(
        "moved", "a reward on an untrained token, in estimators that run over tokens"
    )
    outside_mask: Literal["zero", "kept"] = _rule(
        "zero", "advantages and returns of untrained tokens (no loss reads them)"
    )
    gap_returns: Literal["zero", "with values"] = _rule(
        "zero", "returns of untrained tokens in gae: without the critic's value, or with it"
    )
    zero_tail: Literal["one member left", "second longest"] = _rule(
        "one member left", "where handle_zero_tail of the token baselines begins"
    )
    components: Literal["float64", "float32"] = _rule(
        "float64", "precision in which gdpo standardises the components of a reward"
    )
    gpg_scale: Literal["groups that differ", "scores other than 0"] = _rule(
        "groups that differ", "rows that count in the scale of gpg's advantages, rows / rows that count"
    )
    empty_rows: Literal["left out", "counted in geo_mean", "counted"] = _rule(
        "left out", "sequences without a trained token in means over sequences"
    )
    rejection: Literal["leaves the mask", "zero weight"] = _rule(
        "leaves the mask",
        "what rollout correction rejects: no part of advantages and denominators, or of both with loss 0",
    )
    cispo_cap: Literal["1 + clip_ratio_high", "clip_ratio_high"] = _rule(
        "1 + clip_ratio_high", "largest ratio in cispo; the second form has no lower limit"
    )
    warmup: Literal["from 1/n", "from 0"] = _rule(
        "from 1/n",
        "learning rate of the first update of a warm-up; from 0: a cosine rises again after its end",
        EVERY_TASK,
    )
    warmup_length: Literal["rounded down", "rounded up"] = _rule(
        "rounded down", "lr_warmup_steps_ratio times the length of the run", EVERY_TASK
    )
    schedule_unit: Literal["step", "update"] = _rule(
        "step", "what learning-rate schedules count, lr_warmup_steps too"
    )
    validation_loss: Literal["tokens", "batches", "rows"] = _rule(
        "tokens",
        "val/loss: mean over all tokens, or of the means of batches, which count once or by rows",
        "sft",
    )
    ipo_log_probs: Literal["averaged", "summed"] = _rule(
        "averaged", "log-probs of an answer in ipo, if loss.length_normalized is not set", "dpo"
    )
    chosen_nll: Literal["answers", "micro-batch"] = _rule(
        "answers", "loss.nll_coef: mean of the answers' means, or over the tokens of a micro-batch", "dpo"
    )
    best_of_n: Literal["exact", "bootstrap"] = _rule(
        "exact", "best@n, worst@n and maj@n of validation: over all subsets, or 1000 draws with replacement"
    )


STROP = Conventions()
VERL = Conventions(
    scorers="verl",
    whitening_one_token="error",
    stray_rewards="lost",
    outside_mask="kept",
    gap_returns="with values",
    zero_tail="second longest",
    components="float32",
    gpg_scale="scores other than 0",
    empty_rows="counted in geo_mean",
    warmup="from 0",
    validation_loss="batches",
    best_of_n="bootstrap",
)
OPENRLHF = Conventions(
    overlong_penalty="capped",
    reward_place="last trained token",
    group_baseline="before the KL",
    reward_clip="after the baseline",
    kl_limit=10.0,
    k3_exponent_limit=float("inf"),
    group_eps=1e-9,
    whitening="n",
    gaps="steps",
    stray_rewards="lost",
    outside_mask="kept",
    rejection="zero weight",
    warmup="from 0",
    warmup_length="rounded up",
    schedule_unit="update",
    validation_loss="batches",
    ipo_log_probs="summed",
)
TRL = Conventions(
    kl_limit=float("inf"),
    k3_exponent_limit=float("inf"),
    group_eps=1e-4,
    empty_rows="counted",
    cispo_cap="clip_ratio_high",
    warmup="from 0",
    warmup_length="rounded up",
    schedule_unit="update",
    validation_loss="rows",
    chosen_nll="micro-batch",
)
FRAMEWORKS = {"strop": STROP, "verl": VERL, "openrlhf": OPENRLHF, "trl": TRL}


def conventions(compat: str | None) -> Conventions:
    """The conventions of a value of algorithm.compat."""
    if compat is None:
        return STROP
    if compat not in FRAMEWORKS:
        raise ValueError(f"algorithm.compat must be one of {', '.join(FRAMEWORKS)}, got {compat!r}.")
    return FRAMEWORKS[compat]


def table() -> str:
    """What each value of algorithm.compat changes, as a Markdown table. An empty cell is Strop's value."""
    lines = [
        "| convention | tasks | what it decides | strop | verl | openrlhf | trl |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in fields(Conventions):
        ours = getattr(STROP, each.name)
        cells = [str(ours)]
        for peer in (VERL, OPENRLHF, TRL):
            theirs = getattr(peer, each.name)
            cells.append("" if theirs == ours else str(theirs))
        facts = each.metadata
        lines.append(f"| `{each.name}` | {facts['tasks']} | {facts['what']} | {' | '.join(cells)} |")
    return "\n".join(lines)
