"""A score that never came is not a zero: not in a baseline, not in a filter, not in a metric."""

from __future__ import annotations

import math

import pytest

from strop.catalog import ADVANTAGES
from strop.config.compose import load
from strop.ppo.collect import GroupFilter
from strop.ppo.experience import ExperienceFacts, add_advantages
from strop.rewards.scorer import BrokenScorer
from strop.run.checkpoint.store import load as load_checkpoint
from strop.types import Prompt, Trajectory, batch_of
from tests.ppo import runs
from tests.ppo.runs import run, same, weights


def sample(group, score, response=(5, 6)):
    prompt = Prompt(group, [1, 2], [], "arithmetic")
    return Trajectory(prompt, group, list(response), [1] * len(response), [-1.0] * len(response), score=score)


def advantages(estimator, trajectories):
    config = load("ppo_trainer", [f"algorithm.adv_estimator={estimator}"]).config
    batch = batch_of(trajectories)
    facts = ExperienceFacts.of(config, on_policy=True)
    batch = batch.replace(rewards=batch.scores)
    return add_advantages(batch, config.algorithm, facts, trajectories).advantages


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "opo", "gpg", "flash_reinforce", "grpo_passk", "reinforce_plus_plus"]
)
def test_failed_samples_change_nothing_for_the_others(estimator):
    good = [sample(0, 1.0), sample(0, 0.0), sample(0, 0.5), sample(1, 0.25), sample(1, 1.0)]
    with_failures = [good[0], sample(0, None, (7, 8, 9)), *good[1:4], sample(1, None), good[4]]
    alone, among = advantages(estimator, good), advantages(estimator, with_failures)
    places = [0, 2, 3, 4, 6]
    assert (among[places, :2] == alone).all()
    assert (among[[1, 5]] == 0).all()


def test_a_sample_whose_peers_all_failed_has_no_baseline_and_no_advantage():
    found = advantages("grpo", [sample(0, 1.0), sample(0, None), sample(1, 1.0), sample(1, 0.0)])
    assert (found[0] == 0).all() and found[2, 0] > 0


def test_a_failed_sample_does_not_make_its_group_disagree():
    rows = [sample(0, 1.0), sample(0, None), sample(0, 1.0), sample(1, 0.0), sample(1, 1.0), sample(1, None), sample(2, 1.0),
            sample(2, None)]  # fmt: skip
    assert GroupFilter("score", None, 0).keep(rows) == [False] * 3 + [True] * 3 + [False] * 2
    assert GroupFilter("score", None, 0).keep(rows[-2:]) == [False, False]
    assert GroupFilter("score", (0.1, 0.9), 0).keep(rows) == [False] * 3 + [True] * 3 + [False] * 2


MOODY = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if len(solution_str) % 3 == 0:
        raise RuntimeError("three")
    return 1.0 + 0.25 * (len(solution_str) % 2)
"""


@pytest.fixture
def moody(overrides, tmp_path):
    reward = tmp_path / "moody.py"
    reward.write_text(MOODY)
    return [
        *overrides,
        f"custom_reward_function.path={reward}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]


def test_the_mean_score_is_that_of_scored_samples(moody):
    for metrics in run(moody).values():
        assert 0 < metrics["reward/failed"] < 32
        assert metrics["critic/score/mean"] == pytest.approx(metrics["reward/score/mean"], abs=1e-6)
        assert metrics["critic/score/min"] >= 1.0


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES.names()))
def test_every_estimator_lives_with_failures(moody, estimator):
    steps = run(
        moody,
        f"algorithm.adv_estimator={estimator}",
        "trainer.total_training_steps=1",
        "data.train_batch_size=8",
    )
    assert all(math.isfinite(value) for value in steps[1].values())


def test_failures_of_all_draws_are_counted(moody, tmp_path):
    steps = run(
        moody,
        "algorithm.filter_groups.enable=true",
        "data.gen_batch_size=2",
        "trainer.total_training_steps=1",
    )
    draws = steps[1]["train/num_gen_batches"]
    assert draws >= 4 and 4 <= steps[1]["reward/failed"] <= draws * 8
    assert 1.0 <= steps[1]["reward/score/mean"] <= 1.25


VALIDATION_FAILS = """
from pathlib import Path
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["split"] == "test" and Path({flag!r}).exists():
        raise RuntimeError("the judge is down")
    return solution_str.count("7") / 4
"""


def test_a_validation_that_cannot_be_scored_loses_no_step(overrides, tmp_path):
    """The judge fails after the first validation. The trained steps are saved, and validated after a resume."""
    flag = tmp_path / "down"
    (tmp_path / "reward.py").write_text(VALIDATION_FAILS.format(flag=str(flag)))
    base = [*overrides, f"custom_reward_function.path={tmp_path}/reward.py", "trainer.save_freq=100"]
    calm = run(base, f"trainer.default_local_dir={tmp_path}/calm")
    flag.touch()
    with pytest.raises(BrokenScorer, match="the judge is down"):
        run(base, "trainer.val_before_train=false")
    assert load_checkpoint(tmp_path / "run" / "global_step_2")["trainer"]["validation_dropped"]
    assert "critic/score/mean" in runs.metrics(tmp_path / "run")[2]
    flag.unlink()
    resumed = run(base)
    name = "val-core/arithmetic/reward/mean@1"
    assert [resumed[step][name] for step in (2, 4)] == [calm[step][name] for step in (2, 4)]
    assert same(weights(tmp_path / "calm", 4), weights(tmp_path / "run", 4))
