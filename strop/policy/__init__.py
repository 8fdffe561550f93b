"""The primitives of custom training loops: sample, log-probs, forward and backward, optimizer step."""
