"""How far a supervised run has come, and what a reward model's scores look like on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.models.heads import RewardStatistics

REMEMBERED = 0.98
"""Weight of the past in the running moments of the scores: about the last fifty updates."""


@dataclass
class Progress:
    """Tokens and rows seen so far, and the time left. What was seen is part of a checkpoint; the clock is not."""

    tokens: int = 0
    rows: int = 0
    clock: Callable[[], float] = time.monotonic

    def start(self, step: int, total_steps: int) -> None:
        self.first, self.total, self.begun = step, total_steps, self.clock()

    def after(self, step: int, *, tokens: int, rows: int) -> dict[str, float]:
        """Metrics after a step that took in so many tokens and rows."""
        self.tokens, self.rows = self.tokens + tokens, self.rows + rows
        per_step = (self.clock() - self.begun) / (step - self.first)
        return {
            "train/global_tokens": tokens,
            "train/total_tokens": self.tokens,
            "train/total_rows": self.rows,
            "perf/eta_s": per_step * (self.total - step),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens, self.rows = int(state["tokens"]), int(state["rows"])


@dataclass
class ScoreMoments:
    """Mean and deviation of all scores, of chosen and rejected answers alike: what makes rewards of one run comparable.

    Those of the latest validation count; without validation, running ones of the training pairs.
    """

    validated: bool = False
    moments: dict[str, float] = field(default_factory=lambda: {"mean": 0.0, "square": 0.0, "weight": 0.0})

    def __call__(self, found: dict[str, float], validation: bool) -> None:
        """Look at the means a loss reported, and replace the plain second moment by the deviation."""
        mean, square = (found["chosen_reward"] + found["rejected_reward"]) / 2, found.pop("score_square")
        found |= {"score_mean": mean, "score_std": _deviation(mean, square)}
        if validation:
            self.validated, self.moments = True, {"mean": mean, "square": square, "weight": 1.0}
        elif not self.validated:
            new = {"mean": mean, "square": square, "weight": 1.0}
            self.moments = {name: REMEMBERED * old + (1 - REMEMBERED) * new[name] for name, old in self.moments.items()}

    @property
    def statistics(self) -> RewardStatistics:
        weight = self.moments["weight"]
        if not weight:
            return RewardStatistics()
        mean = self.moments["mean"] / weight
        return RewardStatistics(mean, max(_deviation(mean, self.moments["square"] / weight), 1e-8))

    def state_dict(self) -> dict[str, Any]:
        return {"validated": self.validated, "moments": dict(self.moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.validated, self.moments = bool(state["validated"]), {k: float(v) for k, v in state["moments"].items()}


def _deviation(mean: float, square: float) -> float:
    return math.sqrt(max(square - mean * mean, 0.0))
