"""Who talks in a rollout: loops, tools, interactions."""
