"""Where our default deliberately gives another number than a peer. Each is still reproduced through the named switch.

(pattern of the peer's function, tag of the case or "" for all) -> (switch that reproduces it, why our default differs)
"""

DIFFERENCES: dict[tuple[str, str], tuple[str, str]] = {
    ("verl.utils.torch_functional.get_*_schedule_with_warmup", ""): (
        'compat="verl"',
        "warm-up starts at 1/warmup_steps, not 0, so no update is wasted; past the end a cosine stays at its floor",
    ),
    ("verl.trainer.ppo.metric_utils.process_validation_metrics", ""): (
        'estimator="bootstrap"',
        "best/worst/maj@n are exact over subsets without replacement: best@N is the true maximum, and no noise",
    ),
    ("verl.utils.reward_score.gsm8k.compute_score", ""): (
        'compat="verl"',
        "numbers are compared by value: 42. and 42.00 are 42, and 1,234 is 1234 under `flexible` too (15 of 76 scores change)",
    ),
    ("verl.utils.reward_score.math_reward.compute_score", ""): (
        'compat="verl"',
        "fbox counts, 1,000 is 1000, `5 \\text{cm}` is 5, `\\text{(A)}` is A (4 of 46 scores change)",
    ),
    ("verl.utils.reward_score.math_dapo.compute_score", ""): (
        'compat="verl"',
        "a box is normalised like an `Answer:` line instead of compared raw (48 of 92 scores change)",
    ),
    ("verl.utils.metric.utils.reduce_metrics", ""): (
        'compat="verl"',
        "max and min are words of the name, not letters anywhere in it: the mean of `admin` is a mean",
    ),
}

_ZERO = "positions outside the mask are exactly 0 here, so nothing can leak from them"
_STRAY = "a reward standing outside the mask counts for the last valid token before it; the peer loses it"
_VERL = 'compat="verl"'
_OPENRLHF = 'compat="openrlhf"'

DIFFERENCES |= {
    **{("*.compute_gae_advantage_return", tag): (_VERL, _ZERO) for tag in ("ragged", "holes", "single_row")},
    ("*.compute_gae_advantage_return", "leaky"): (_VERL, _STRAY),
    ("*.compute_gae_advantage_return", "one_valid_token"): (_VERL, "a lone advantage becomes 0; the run goes on"),
    ("*.compute_reinforce_plus_plus_outcome_advantage", "leaky"): (_VERL, _STRAY),
    ("*.compute_reinforce_plus_plus_outcome_advantage", "one_valid_token"): (
        _VERL,
        "a lone advantage becomes 0; the run goes on",
    ),
    **{
        (f"*.compute_{name}_advantage", tag): (_VERL, reason)
        for name in ("remax_outcome", "optimal_token_baseline", "multi_turn_optimal_token_baseline")
        for tag, reason in (("leaky", _STRAY), ("holes", _ZERO))
    },
    ("*.compute_gdpo_outcome_advantage", "multi_reward"): (
        _VERL,
        "compared in float64, so parts that cancel leave no rounding",
    ),
    ("verl.*.masked_whiten", "ragged"): (_VERL, _ZERO),
    ("verl.*.masked_whiten", "holes"): (_VERL, _ZERO),
    ("verl.*.masked_whiten", "empty_row"): (_VERL, _ZERO),
    ("verl.utils.groupwise.as_torch_index", ""): ("compact=False", "ids never have gaps, whatever integers label the prompts"),
    ("openrlhf.*.get_advantages_and_returns", "holes"): (
        f"skip_gaps=False, {_OPENRLHF}",
        "text the policy did not write is no time step: it is not discounted and has no value",
    ),
    ("openrlhf.*.get_cumulative_returns", "holes"): (
        f"skip_gaps=False, {_OPENRLHF}",
        "text the policy did not write is no time step: it is not discounted",
    ),
    ("openrlhf.*.compute_advantages_and_returns", ""): (f"skip_gaps=False, {_OPENRLHF}", _ZERO),
    **{
        ("openrlhf.*.compute_reward", tag): (_OPENRLHF, "the KL is charged for tokens of the policy only")
        for tag in ("ragged", "holes", "single_row")
    },
    ("openrlhf.models.utils.masked_mean", "nonfinite"): ("eps=0", "the mean of nothing is 0, not NaN"),
}

_SEQUENCES = "a sequence without trained tokens is no sequence: it does not dilute the mean"

DIFFERENCES |= {
    ("*.agg_loss", "all_masked"): ("Totals(tokens=0, ...)", "Totals.of an empty mask counts one token: the loss is 0, not 0/0"),
    ("*.compute_policy_loss_geo_mean", "empty_row"): ("Totals(sequences=rows, ...)", _SEQUENCES),
    ("*.GRPOTrainer._compute_loss", "empty_row"): ("Totals(sequences=rows, ...)", _SEQUENCES),
    ("*.compute_policy_loss_bypass_mode", ""): (
        "aggregate over the metric `kept`",
        "rejected tokens stay in the denominators, which are known before the update and do not depend on micro-batches",
    ),
    ("*.compute_rollout_correction_weights", "all_outside_band"): (
        "raise when eff_sample_size is 0",
        "a band that drops every token gives weights and an effective sample size of 0, not a division by zero",
    ),
    ("*.GRPOTrainer._compute_loss", "vespo"): (
        "rollout_weights with the strangers' product",
        "weights of padding and tool output do not enter the weight of a sequence",
    ),
    ("verl.*.entropy_from_logits*", ""): (
        "none: compared within the float32 rounding of the logits",
        "entropy is summed from p log p, not taken as the difference of two numbers as large as the logits",
    ),
}
