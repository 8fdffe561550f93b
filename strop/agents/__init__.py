"""Multi-turn rollouts: episodes, agent loops, tools, simulated users."""
