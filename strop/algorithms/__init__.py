"""Pure functions of tensors: advantages, losses, KL, aggregation, rollout correction, metrics. They do no I/O
and do not depend on the configuration."""
