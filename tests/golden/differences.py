"""Where our default deliberately gives another number than a peer: the one table of it.

`test_golden.py` runs every case with our defaults and with the switch. A case that our defaults do not reproduce must fall
under an entry here, every entry must be needed by some case, and the switch must reproduce the peer's number. The table of
`docs/algorithms.md` is made from this one: `python -m tests.golden.differences` prints it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import NamedTuple


class Difference(NamedTuple):
    functions: str  # pattern of the peer's function
    tag: str  # of the cases it is about, or several with | between them; "" for all of them
    here: str  # what ours is called
    switch: str  # reproduces the peer's number
    reason: str
    setting: tuple[str, object] | None = None  # only cases with this keyword argument
    outside: bool = False  # trained tokens are equal: only values outside the mask differ


class Unrecorded(NamedTuple):
    """A difference that no recorded case shows; a test of `test_unrecorded.py` does."""

    here: str
    peer: str
    reason: str
    switch: str
    test: str


_ANY_GAP = "holes|holes_tail|leading_gap"
_VERL = '`compat="verl"`'
_OPENRLHF = '`compat="openrlhf"`'
_GAPS = '`skip_gaps=False, compat="openrlhf"`'
_ZERO = "positions outside the mask are exactly 0, so no value can leak from them; the other framework leaves values there"
_STRAY = "a reward outside the mask is moved to the last valid token before it; the other framework loses it"
_LONE = "a batch with a single valid token has advantage 0 and the run continues; the other framework raises an error"
_STEP = (
    "tokens that the policy did not sample are not time steps: no discount, no value, and results are 0 there"
)
_SEQUENCES = "a sequence without trained tokens is not counted in the mean"
_ROUNDING = "summed from exp(z - max z), so a small entropy keeps its precision; the others subtract two numbers as large as the logits"

DIFFERENCES = (
    Difference("*.compute_gae_advantage_return", "leaky", "advantage gae", _VERL, _STRAY),
    Difference("*.compute_gae_advantage_return", "one_valid_token", "advantage gae", _VERL, _LONE),
    Difference("*.compute_gae_advantage_return", "", "advantage gae", _VERL, _ZERO, outside=True),
    Difference(
        "*.compute_reinforce_plus_plus_outcome_advantage",
        "leaky",
        "advantage reinforce_plus_plus",
        _VERL,
        _STRAY,
    ),
    Difference(
        "*.compute_reinforce_plus_plus_outcome_advantage",
        "one_valid_token",
        "advantage reinforce_plus_plus",
        _VERL,
        _LONE,
    ),
    Difference("*.compute_remax_outcome_advantage", "leaky", "advantage remax", _VERL, _STRAY),
    Difference("*.compute_remax_outcome_advantage", _ANY_GAP, "advantage remax", _VERL, _ZERO, outside=True),
    Difference(
        "*optimal_token_baseline_advantage", "leaky", "advantage (tir_)optimal_token_baseline", _VERL, _STRAY
    ),
    Difference(
        "*.compute_optimal_token_baseline_advantage",
        _ANY_GAP,
        "`handle_zero_tail` of optimal_token_baseline",
        _VERL,
        "the baseline is 0 where a single member of the group has a trained token; the other framework counts tokens, not positions, so with gaps its tail begins too early",
        setting=("handle_zero_tail", True),
    ),
    Difference(
        "*optimal_token_baseline_advantage",
        _ANY_GAP,
        "advantage (tir_)optimal_token_baseline",
        _VERL,
        _ZERO,
        outside=True,
    ),
    Difference(
        "*.compute_gdpo_outcome_advantage",
        "multi_reward",
        "advantage gdpo",
        _VERL,
        "computed in float64, so reward components that cancel leave no rounding error for the whitening to amplify",
    ),
    Difference(
        "*.compute_gpg_outcome_advantage",
        "",
        "advantage gpg",
        _VERL,
        "the scale counts rows of groups whose scores differ, as in the paper; the other framework counts scores that are not 0, so a constant added to all scores changes it",
    ),
    Difference("openrlhf.*.get_advantages_and_returns", "", "advantage gae", _GAPS, _STEP),
    Difference("openrlhf.*.get_cumulative_returns", "", "advantage reinforce", _GAPS, _STEP),
    Difference(
        "openrlhf.*.compute_advantages_and_returns",
        "",
        "`terminal_rewards`, then gae or reinforce",
        _GAPS,
        f"{_STEP}; see the KL",
    ),
    Difference(
        "openrlhf.models.utils.compute_reward",
        "",
        "`terminal_rewards`",
        _OPENRLHF,
        "the KL penalty applies only to tokens of the policy",
    ),
    Difference(
        "openrlhf.models.utils.compute_approx_kl",
        "extreme_gap",
        "KL k1, k2",
        "`limit=10.0`",
        "only k3 is clipped, as in verl: a clipped k1 or k2 has no gradient where the policy is farthest from the reference",
    ),
    Difference("verl.*.masked_whiten", "", "`masked_whiten`", _VERL, _ZERO),
    Difference(
        "openrlhf.models.utils.masked_mean",
        "nonfinite",
        "`masked_mean`",
        "`eps=0`",
        "the mean of an empty mask is 0, not NaN",
    ),
    Difference(
        "verl.utils.groupwise.as_torch_index",
        "",
        "`group_ids`",
        "`compact=False`",
        "ids are consecutive for any integer labels of prompts",
    ),
    Difference(
        "*.agg_loss",
        "all_masked",
        "`Totals.of`",
        "`Totals(tokens=0, ...)`",
        "an empty mask counts as one token: the loss is 0, not 0/0",
    ),
    Difference(
        "*.compute_policy_loss_geo_mean",
        "empty_row",
        "loss geo_mean",
        "`Totals(sequences=rows, ...)`",
        _SEQUENCES,
    ),
    Difference(
        "*.GRPOTrainer._compute_loss",
        "empty_row",
        "seq-mean aggregations",
        "`Totals(sequences=rows, ...)`",
        _SEQUENCES,
    ),
    Difference(
        "*.GRPOTrainer._compute_loss",
        "vespo",
        "loss vespo",
        "put the product of the other weights on one token of the row",
        "rollout weights of padding and tool output are not part of the weight of a sequence",
    ),
    Difference(
        "*.compute_policy_loss_bypass_mode",
        "",
        "loss bypass_mode",
        "aggregate over its metric `kept`",
        "rejected tokens stay in the denominators, so these are known before the update and independent of micro-batches",
    ),
    Difference(
        "*.compute_rollout_correction_weights",
        "all_outside_band",
        "`importance_weights`",
        "raise where `rollout_is_eff_sample_size` is 0",
        "a band that drops every token gives weights of 0 and an effective sample size of 0; the other framework divides by zero",
    ),
    Difference(
        "*entropy*", "", "`token_entropy`", "none: equal within the float32 rounding of the logits", _ROUNDING
    ),
    Difference(
        "verl.utils.torch_functional.get_*_schedule_with_warmup",
        "",
        "every schedule",
        _VERL,
        "warm-up starts at 1/warmup_steps, not 0, so no update is wasted; after the last step a cosine stays at its minimum",
    ),
    Difference(
        "*.process_validation_metrics",
        "",
        "`validation_metrics`",
        '`estimator="bootstrap"`',
        "best, worst and maj@n are exact over subsets without replacement: best@N is the true maximum, without sampling noise",
    ),
    Difference(
        "verl.utils.metric.utils.reduce_metrics",
        "",
        "`reduce_metrics`",
        _VERL,
        "max and min must be whole words of the name, not substrings: a metric called `admin` is averaged",
    ),
    Difference(
        "verl.utils.reward_score.gsm8k.compute_score",
        "",
        "scorer gsm8k",
        _VERL,
        "the whole answer after `####` is compared by value: 42.00 is 42, 1/2 is not 1, and 42 or 43 is not 42",
    ),
    Difference(
        "verl.utils.reward_score.math_reward.compute_score",
        "",
        "scorer math_boxed",
        _VERL,
        r"answers are compared by value (0.25 is 1/4, `\sqrt{8}` is `2\sqrt{2}`, `9\text{ or }8` is not 9), and `\fbox` counts",
    ),
    Difference(
        "verl.utils.reward_score.prime_math.compute_score",
        "",
        "scorer math_symbolic",
        _VERL,
        "our own arithmetic decides in bounded time, not math-verify: 50% is exactly 0.5",
    ),
    Difference(
        "verl.utils.reward_score.math_dapo.compute_score",
        "",
        "scorer math_dapo",
        _VERL,
        "answers are compared by value, `\\boxed{}` too, which is searched in the last 300 characters; the other framework compares it raw",
    ),
)


UNRECORDED = (
    Unrecorded(
        "`overlong_buffer` beyond the longest response",
        "OpenRLHF",
        "the penalty keeps growing, as in verl; OpenRLHF stops at the factor",
        _OPENRLHF,
        "test_the_overlong_penalty_beyond_the_limit",
    ),
    Unrecorded(
        "`gamma_weights` of loss vespo",
        "TRL",
        "rollout weights of padding and tool output are not part of the weight of a sequence",
        "put the product of the other weights on one token of the row",
        "test_gamma_weights_have_the_limits_of_the_peer",
    ),
    Unrecorded(
        "masks with fractions",
        "verl, OpenRLHF, TRL",
        "a mask says which tokens count: anything but 0 is 1, also in denominators; the others multiply with it",
        "give weights as `rollout_weights`",
        "test_a_fraction_in_a_mask_counts_as_one",
    ),
    Unrecorded(
        '`rollout_rs=""`',
        "verl",
        "no criterion rejects nothing; the other framework raises an error",
        "none",
        "test_no_criterion_rejects_nothing",
    ),
)


def difference_of(function: str, tags: list[str], settings: Mapping[str, object]) -> Difference | None:
    """The first entry that a case of this function with these tags and keyword arguments falls under."""
    for difference in DIFFERENCES:
        if not fnmatch.fnmatch(function, difference.functions):
            continue
        if difference.tag and not set(difference.tag.split("|")) & set(tags):
            continue
        if difference.setting and settings.get(difference.setting[0]) != difference.setting[1]:
            continue
        return difference
    return None


def table() -> str:
    """All entries as a Markdown table; entries that say the same of one thing are one row."""
    rows = dict.fromkeys((d.here, _peer(d.functions), d.reason, d.switch) for d in DIFFERENCES)
    lines = [
        "| here | framework | our default, and why | switch for its number |",
        "| --- | --- | --- | --- |",
    ]
    every = [*rows, *((u.here, u.peer, u.reason, u.switch) for u in UNRECORDED)]
    return "\n".join(
        lines + [f"| {here} | {peer} | {reason} | {switch} |" for here, peer, reason, switch in every]
    )


def _peer(functions: str) -> str:
    known = {"openrlhf": "OpenRLHF", "verl": "verl", "*.GRPOTrainer": "TRL", "*entropy*": "verl, OpenRLHF"}
    return next((name for start, name in known.items() if functions.startswith(start)), "verl")


if __name__ == "__main__":
    print(table())
