"""What a run adds to every score: length penalty, penalty for not stopping, limits; in this order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.types import Trajectory


@dataclass(frozen=True)
class Shaping:
    """Nothing of it is on by default."""

    overlong_buffer: int | None = None
    """Tokens before `max_response_length` over which DAPO's penalty grows."""
    overlong_factor: float = 1.0
    max_response_length: int | None = None
    log_overlong: bool = False
    """Report `overlong_reward` and `overlong` of each sample."""
    truncated: float | None = None
    """Responses cut at the length limit: in [0, 1] their score is multiplied by it, a negative number replaces the score."""
    clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.overlong_buffer is not None:
            if self.max_response_length is None:
                raise ValueError(
                    "reward_model.overlong_buffer.enable=true needs the longest response: set "
                    "reward_model.reward_kwargs.max_resp_len, or data.max_response_length."
                )
            if not 0 < self.overlong_buffer <= self.max_response_length:
                raise ValueError(
                    f"reward_model.overlong_buffer.len={self.overlong_buffer} must lie between 1 and the longest response, "
                    f"{self.max_response_length} tokens."
                )
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"reward_model.clip_range must be [low, high] with low < high, it is {list(self.clip)}.")

    def apply(self, scores: Sequence[float], trajectories: Sequence[Trajectory]) -> tuple[list[float], list[dict[str, Any]]]:
        """The shaped scores, and what is to be reported beside each."""
        if not scores or (self.overlong_buffer is None and self.truncated is None and self.clip is None):
            return list(scores), [{} for _ in scores]
        import torch

        from strop.algorithms.reward_shaping import overlong_penalty, truncation_penalty

        shaped = torch.tensor(scores, dtype=torch.float64)
        reports: list[dict[str, Any]] = [{} for _ in scores]
        if self.overlong_buffer is not None:
            assert self.max_response_length is not None
            lengths = torch.tensor([len(t.response) for t in trajectories], dtype=torch.float64)
            penalty = overlong_penalty(
                lengths, max_length=self.max_response_length, buffer=self.overlong_buffer, factor=self.overlong_factor
            )
            shaped = shaped + penalty
            if self.log_overlong:
                reports = [{"overlong_reward": value, "overlong": value < 0} for value in penalty.tolist()]
        if self.truncated is not None:
            cut = torch.tensor([t.finish == "length" for t in trajectories])
            shaped = truncation_penalty(shaped, cut, coef=self.truncated)
        if self.clip is not None:
            shaped = shaped.clamp(*self.clip)
        return shaped.tolist(), reports
