"""Credit by turn: a turn is compared by what its episode earned from it on."""

from __future__ import annotations

import pytest
import torch

from strop.types import Trajectory, Turn
from tests.ppo.test_episode_rows import advantages, row

KEY = "actor_rollout_ref.rollout.agent.credit"


def talks() -> list[Trajectory]:
    """Three episodes of one prompt. The first has two turns with rewards, a tool between them, and a branch."""
    turns = [Turn("assistant", 0, 2), Turn("tool", 2, 3), Turn("assistant", 3, 5)]
    branch = row(0, 4, turns=[Turn("assistant", 0, 2), Turn("assistant", 2, 4)], turn_rewards={1: 0.25})
    first = row(0, 5, 1.0, branch, turns=turns, turn_rewards={1: 0.5})
    first.mask = [1, 1, 0, 1, 1]
    return [first, row(0, 2, 0.5, turns=[Turn("assistant", 0, 2)]), row(0, 3, 0.0)]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "rloo_vectorized"])
def test_a_turn_is_compared_by_what_came_from_it_on(estimator: str) -> None:
    word = f"algorithm.adv_estimator={estimator}"
    found = advantages(talks(), word, f"{KEY}=turn").advantages
    shared = advantages(talks(), word, f"{KEY}=shared").advantages
    assert found is not None and shared is not None

    def whole(total: float) -> torch.Tensor:
        """The advantage of an episode with this sum."""
        made = advantages([row(0, 1, total), row(0, 1, 0.5), row(0, 1, 0.0)], word).advantages
        assert made is not None
        return made[0, 0]

    torch.testing.assert_close(found[0, :2], whole(1.75).expand(2))
    torch.testing.assert_close(found[0, 3:5], whole(1.25).expand(2))
    torch.testing.assert_close(found[1, :2], whole(1.75).expand(2))
    torch.testing.assert_close(found[1, 2:4], whole(1.5).expand(2))
    assert found[0, 2] == 0 and (found[2:] == shared[2:]).all()


def test_without_rewards_of_turns_it_is_the_advantage_of_the_episode() -> None:
    made = []
    for rule in ("turn", "shared"):
        made.append(
            advantages([row(0, 2, 1.0), row(0, 3, 0.0)], "algorithm.adv_estimator=grpo", f"{KEY}={rule}")
        )
    assert made[0].advantages is not None and made[1].advantages is not None
    assert torch.equal(made[0].advantages, made[1].advantages)
