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
    ("verl.utils.metric.utils.reduce_metrics", ""): (
        'compat="verl"',
        "max and min are words of the name, not letters anywhere in it: the mean of `admin` is a mean",
    ),
}
