"""Conversations ahead of training: interrupted in the middle of an answer, whole and masked as ever."""

from __future__ import annotations

import pytest

from tests.ppo.test_agents import game, games, played  # noqa: F401 - fixtures
from tests.ppo.test_async import ASYNC, BESIDE, PARTIAL


@pytest.mark.parametrize(
    "mode", [[*BESIDE, *PARTIAL], pytest.param(PARTIAL, marks=pytest.mark.slow)], ids=["beside", "between"]
)
def test_conversations_run_ahead(game, mode):  # noqa: F811
    quiet = ["trainer.total_training_steps=4", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    steps = played(game, *quiet, *mode, f"{ASYNC}max_policy_age=1")
    for step in range(1, 5):
        assert (
            steps[step]["agent/episodes"] == steps[1]["agent/episodes"]
            and steps[step].get("agent/failed", 0) == 0
        )
        assert steps[step]["staleness/max"] <= 1
    assert steps[1]["staleness/max"] == 0 and steps[1]["training/rollout_logprobs_diff_max"] < 1e-4, (
        "the very weights"
    )
    assert [steps[step]["staleness/prompts_ahead"] for step in range(1, 5)] == [16, 16, 16, 0]
