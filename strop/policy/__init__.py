"""The primitives of training for one's own loop: sample, log-probs, forward and backward, optimizer step."""
