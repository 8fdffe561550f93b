"""Reward managers: how scorers are called, and how a configuration chooses."""

from strop.rewards.managers.build import build_scorer

__all__ = ["build_scorer"]
