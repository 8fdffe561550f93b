"""One sequence of a conversation after its prompt: ids, mask, log-probs, turns and rewards, aligned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strop.rollout.base import merge_spans
from strop.types import Prompt, Trajectory, Turn, join_experts

if TYPE_CHECKING:
    import numpy as np


@dataclass
class TokenRow:
    """Grows turn by turn."""

    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Spans of sampled tokens by the version of the weights."""
    rewards: dict[int, float] = field(default_factory=dict)
    """By the last token of the turn that is rewarded."""
    player: str = ""
    """In episodes of several players: whose sequence it is."""
    experts: np.ndarray | None = None
    """Of prompt and response, where the engine records them: see Trajectory."""

    def add_sampled(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[tuple[int, int]],
        experts: np.ndarray | None = None,
    ) -> None:
        """Append an answer of the policy. `experts`: of all tokens up to its last one, at most."""
        self._add("assistant", ids, log_probs, 1)
        self.versions = merge_spans([*self.versions, *versions])
        self.experts = join_experts(self.experts, experts)

    def add_given(self, role: str, ids: Sequence[int]) -> None:
        """Append messages of the environment."""
        self._add(role, ids, [0.0] * len(ids), 0)

    def _add(self, role: str, ids: Sequence[int], log_probs: Sequence[float], mask: int) -> None:
        start = len(self.response)
        self.response += ids
        self.mask += [mask] * len(ids)
        self.log_probs += log_probs
        self.turns.append(Turn(role, start, len(self.response)))

    def trajectory(
        self,
        prompt: Prompt,
        group: int,
        *,
        finish: str,
        score: float | None = None,
        extras: Mapping[str, object] | None = None,
    ) -> Trajectory:
        """Return the row as a sample to train on."""
        sample = Trajectory(
            prompt=prompt,
            group=group,
            response=self.response,
            mask=self.mask,
            log_probs=self.log_probs,
            finish=finish,
            version=max((version for version, _ in self.versions), default=0),
            versions=self.versions if len(self.versions) > 1 else [],
            num_turns=1 + len(self.turns),
            score=score,
            turn_rewards=self.rewards,
            extras=dict(extras or {}),
            turns=self.turns,
            player=self.player,
            experts=self.experts,
        )
        check_exact(sample)
        return sample


def check_exact(trajectory: Trajectory) -> None:
    """Assert that turns cover the response without gaps, that exactly the assistant's tokens are sampled, and
    that rewards are on the last token of a turn."""
    place = 0
    for turn in trajectory.turns:
        assert turn.start == place < turn.end, f"turn {turn} does not follow token {place}"
        sampled = int(turn.role == "assistant")
        assert trajectory.mask[turn.start : turn.end] == [sampled] * (turn.end - turn.start), (
            f"mask of {turn} is not {sampled}"
        )
        assert sampled or not any(trajectory.log_probs[turn.start : turn.end]), (
            f"{turn} was not sampled, but has log-probs"
        )
        place = turn.end
    assert place == len(trajectory.response), f"{len(trajectory.response) - place} tokens belong to no turn"
    ends = {turn.end - 1 for turn in trajectory.turns if turn.role == "assistant"}
    assert set(trajectory.turn_rewards) <= ends, "a reward stands inside a turn"
