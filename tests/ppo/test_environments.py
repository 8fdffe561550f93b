"""An environment as the source of prompts' observations and of all rewards."""

from __future__ import annotations

from strop.config.compose import load
from strop.config.rules import check
from strop.preflight.examine import examine
from tests.ppo.runs import run

SEVENS = """
class Sevens:
    def reset(self, *, seed=None, options=None):
        return "+", {}

    def step(self, action):
        return "=", action.count("7") / 4, True, False, {"length": len(action)}
"""


def test_a_run_learns_from_the_rewards_of_an_environment(overrides, tmp_path):
    (tmp_path / "sevens.py").write_text(SEVENS)
    words = [
        *overrides,
        f"actor_rollout_ref.rollout.environment=gym:{tmp_path}/sevens.py:Sevens",
        "data.max_prompt_length=16",
        "actor_rollout_ref.actor.optim.lr=2e-2",
        "trainer.total_training_steps=6",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    ]
    steps = run(words)
    assert steps[6]["critic/rewards/mean"] > steps[1]["critic/rewards/mean"] + 0.1
    assert steps[1]["agent/environment_steps"] == 32 and steps[1]["agent/failed"] == 0


def test_the_preflight_needs_no_scorer_and_names_a_bad_environment(overrides, tmp_path):
    (tmp_path / "sevens.py").write_text(SEVENS)
    good = f"actor_rollout_ref.rollout.environment=gym:{tmp_path}/sevens.py:Sevens"
    report = examine(load("ppo_trainer", [*overrides, good]))
    assert report.ok, report.findings
    bad = examine(load("ppo_trainer", [*overrides, good.replace("Sevens", "Eights")]))
    assert any("Eights" in finding.message for finding in bad.findings)
    both = load("ppo_trainer", [*overrides, good, "actor_rollout_ref.rollout.agent.command=python agent.py"])
    assert any("plays the rows. Unset one" in str(finding) for finding in check(both))
    alone = load("ppo_trainer", [*overrides, "+actor_rollout_ref.rollout.environment_kwargs.limit=3"])
    assert any(
        "no effect without actor_rollout_ref.rollout.environment" in str(finding) for finding in check(alone)
    )
