"""Pure functions of tensors: advantages, losses, KL, aggregation, correction. No I/O, no processes, no configuration."""
