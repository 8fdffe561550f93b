"""Environments of other libraries as agent loops: rollout.environment."""
