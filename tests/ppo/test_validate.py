"""Validation: several samples per prompt, votes, dumps, samples for the trackers, and when it happens."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext

import pytest

from strop.algorithms.metrics.training import StepRecord
from strop.config.compose import load
from strop.data.loader import Loader
from strop.ppo.collect import Collector, Validator
from strop.ppo.sampler import StepRollout
from strop.preflight.examine import examine
from strop.rewards.scorer import ScoreReport
from strop.rollout.base import Sampling
from strop.run.checkpoint.layout import saved_checkpoints
from strop.types import Prompt
from tests.ppo.runs import run

VOTES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str[:1] in "13579"), "pred": solution_str[:1], "length": len(solution_str),
            "reward": 100.0}
"""


def test_several_samples_per_prompt_with_votes(overrides, tmp_path):
    file = tmp_path / "votes.py"
    file.write_text(VOTES)
    steps = run(
        overrides,
        f"custom_reward_function.path={file}",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        f"trainer.validation_data_dir={tmp_path}/said",
        "trainer.total_training_steps=2",
    )
    core = {
        name.removeprefix("val-core/arithmetic/reward/") for name in steps[0] if name.startswith("val-core/")
    }
    assert {"mean@4", "best@4/mean", "maj@4/mean"} <= core
    aux = {name for name in steps[0] if name.startswith("val-aux/arithmetic/")}
    assert any("best@2" in name for name in aux) and any("length/mean@4" in name for name in aux)
    assert steps[0]["val-core/arithmetic/reward/best@4/mean"] > steps[0]["val-core/arithmetic/reward/mean@4"]
    rows = [json.loads(line) for line in (tmp_path / "said" / "0.jsonl").open()]
    assert len(rows) == 16 * 4
    groups = {row["group"]: {r["output"] for r in rows if r["group"] == row["group"]} for row in rows}
    assert any(len(said) > 1 for said in groups.values())  # a temperature above 0 samples
    expected = sum(row["score"] for row in rows) / len(rows)
    assert abs(expected - steps[0]["val-core/arithmetic/reward/mean@4"]) < 1e-9
    assert {*steps} == {0, 1, 2} and "val-core/arithmetic/reward/mean@4" in steps[2]


def test_validation_before_training_can_be_left_out(overrides):
    steps = run(overrides, "trainer.val_before_train=false")
    assert 0 not in steps and "val-core/arithmetic/acc/mean@1" in steps[2]


def test_a_checkpoint_has_the_metrics_of_its_own_weights(overrides, tmp_path):
    run(overrides, "trainer.save_freq=1", "trainer.test_freq=2")
    rated = [saved.step for saved in saved_checkpoints(tmp_path / "run") if saved.manifest.metrics]
    assert rated == [2, 4]


def test_validation_alone(overrides, tmp_path):
    steps = run(overrides, "trainer.val_only=true", "trainer.val_before_train=false")
    assert set(steps) == {0} and "val-core/arithmetic/acc/mean@1" in steps[0]
    assert not list((tmp_path / "run").glob("global_step_*"))


def test_validation_alone_of_a_checkpoint(overrides, tmp_path):
    trained = run(overrides)
    again = run(overrides, "trainer.val_only=true")
    name = (
        "val-aux/arithmetic/reward/mean@1"
        if "val-aux/arithmetic/reward/mean@1" in trained[4]
        else "val-core/arithmetic/acc/mean@1"
    )
    assert again[4][name] == trained[4][name]


def test_what_cannot_be_closed_keeps_nothing_else_open():
    closed = []

    class Part:
        def __init__(self, name, fails=False):
            self.name, self.fails = name, fails

        def close(self):
            closed.append(self.name)
            if self.fails:
                raise TimeoutError(self.name)
            return True

    rollout = StepRollout(Part("tools"), Sampling(), 1)
    ahead = Part("ahead", fails=True)
    collector = Collector(Part("engine"), rollout, Part("scorer", fails=True), run_ahead=ahead)
    with pytest.raises(TimeoutError):
        collector.close()
    collector.run_ahead = None
    with pytest.raises(TimeoutError, match="scorer"):
        collector.close()
    assert closed[:3] == ["ahead", "scorer", "tools"] and closed[-3:] == ["scorer", "tools", "engine"]


def test_every_validation_has_the_same_order():
    """The place of a prompt in the order is part of its random stream, and a resumed run validates less."""
    prompts = [Prompt(index, [index], [], "test") for index in range(16)]
    orders = []

    class Answering:
        awake = staticmethod(nullcontext)

        def generate(self, prompts, sampling, n, step, first):
            orders[-1] += [prompt.index for prompt in prompts]
            return []

        def score(self, trajectories):
            return ScoreReport(0, 0, 0, 0, 0.0, {})

        def episode_metrics(self):
            return {}

    validator = Validator(Loader(prompts, 5, drop_last=False), Answering(), Sampling(), 1)
    for step in (0, 2):
        orders.append([])
        validator.run(step, StepRecord())
    assert orders[0] == orders[1] and sorted(orders[0]) == list(range(16)) != orders[0]


def test_samples_reach_the_trackers(overrides, tmp_path):
    run(overrides, "trainer.log_val_generations=3")
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.generations.jsonl").open()]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    inputs = [[row["input"] for row in entry["rows"]] for entry in logged]
    assert len(inputs[0]) == 3 and inputs[0] == inputs[1] == inputs[2]  # the same prompts, to be compared


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["trainer.best_metric=val-core/a", "trainer.test_freq=-1"], "best_metric: .* no step is validated"),
        (
            ["algorithm.adv_estimator=gae", "trainer.critic_warmup=5"],
            "critic_warmup: 5, but the run has 4 .*never trained",
        ),
    ],
)
def test_keys_that_never_act_are_said(overrides, keys, said):
    found = "\n".join(map(str, examine(load("ppo_trainer", [*overrides, *keys])).findings))
    assert re.search(said, found), found
