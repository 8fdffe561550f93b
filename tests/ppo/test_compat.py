"""`algorithm.compat` reaches every part of a step: scorer, schedules, denominators, validation, evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from strop.algorithms.metrics.validation import summarise, validation_metrics
from strop.backends.base import MicroBatching, StepInfo
from strop.backends.optimizer import make_schedule
from strop.config.compose import load
from strop.ppo.experience import ExperienceFacts
from strop.ppo.roles import optim_of
from strop.ppo.update import ActorUpdate, run_updates
from strop.rewards.managers import build_scorer
from strop.types import Prompt, Trajectory, batch_of
from tests.ppo.runs import run
from tests.rewards.scene import TOKENIZER

ACTOR = "actor_rollout_ref.actor"


def sample(group: int, score: float, mask: tuple[int, ...] = (1, 1)) -> Trajectory:
    width = len(mask)
    return Trajectory(
        Prompt(group, [1, 2], [], "arithmetic"), group, [5] * width, list(mask), [-1.0] * width, score=score
    )


@pytest.mark.parametrize(("compat", "by_the_scorer"), [("strop", True), ("verl", True), ("openrlhf", False)])
def test_the_clip_range_has_one_place(compat: str, by_the_scorer: bool) -> None:
    config = load("ppo_trainer", ["reward_model.clip_range=[-2,3]", f"algorithm.compat={compat}"]).config
    scorer = build_scorer(
        config.reward_model, config.custom_reward_function, config.reward_manager, TOKENIZER, compat=compat
    )
    facts = ExperienceFacts.of(config, on_policy=True)
    assert (scorer.shaping.clip, facts.reward_clip) == (((-2, 3), None) if by_the_scorer else (None, (-2, 3)))


@dataclass
class CountingBackend:
    """Counts what a step does to the schedule."""

    updates: int = 0
    advanced: int = 0
    out_of_memory: int = 0

    def forward_backward(self, *_: Any) -> dict[str, float]:
        return {}

    def step(self) -> StepInfo:
        self.updates += 1
        return StepInfo(grad_norm=1.0, lr=1.0)

    def advance_schedule(self) -> None:
        self.advanced += 1


@pytest.mark.parametrize(("compat", "advanced"), [("strop", 1), ("verl", 1), ("openrlhf", 4), ("trl", 4)])
def test_schedules_count_steps_or_updates(compat: str, advanced: int) -> None:
    batches = ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2"]
    config = load("ppo_trainer", [f"algorithm.compat={compat}", *batches]).config
    rows = batch_of([sample(i, 1.0) for i in range(4)])
    rows = rows.replace(advantages=torch.ones_like(rows.mask))
    backend = CountingBackend()
    actor = config.actor_rollout_ref.actor
    objective = ActorUpdate(config, width=2.0)
    run_updates(backend, rows, objective, actor, 2, MicroBatching(), 1, "actor")  # type: ignore[arg-type]
    assert (backend.updates, backend.advanced) == (4, advanced)
    length = optim_of(config, actor, total_steps=10).total_training_steps
    assert length == (-1 if advanced == 1 else 40)  # -1: the steps of the run


@pytest.mark.parametrize(
    ("compat", "rates"),
    [("strop", [0.5, 1.0, 1.0]), ("verl", [0.0, 0.5, 1.0]), ("openrlhf", [0.0, 1 / 3, 2 / 3])],
)
def test_warm_up_begins_and_is_rounded_as_in_the_framework(compat: str, rates: list[float]) -> None:
    keys = [f"{ACTOR}.optim.lr_warmup_steps_ratio=0.25", f"{ACTOR}.optim.total_training_steps=10"]
    optim = load("ppo_trainer", [f"{ACTOR}.optim.lr=1.0", *keys]).config.actor_rollout_ref.actor.optim
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(optimizer, optim, compat)
    found = []
    for _ in range(3):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("best_of_n", ["exact", "bootstrap"])
def test_validation_estimates_best_of_n_as_asked(best_of_n: str) -> None:
    trajectories = [sample(0, score) for score in (0.0, 1.0, 0.25, 0.5)]
    found = summarise(trajectories, best_of_n)
    scores = {"reward": [0.0, 1.0, 0.25, 0.5]}
    expected = validation_metrics(["arithmetic"] * 4, ["0"] * 4, scores, estimator=best_of_n)
    best = expected["arithmetic"]["reward"]["best@4/mean"]
    assert found["val-core/arithmetic/reward/best@4/mean"] == best
    assert (best == 1.0) == (best_of_n == "exact")


@pytest.mark.parametrize(("compat", "sequences"), [("strop", 1), ("verl", 1), ("openrlhf", 1), ("trl", 2)])
def test_empty_rows_count_where_the_framework_counts_them(compat: str, sequences: int) -> None:
    keys = [f"algorithm.compat={compat}", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"]
    objective = ActorUpdate(load("ppo_trainer", keys).config, width=2.0)
    assert objective._totals(batch_of([sample(0, 1.0), sample(0, 0.0, (0, 0))])).sequences == sequences


@pytest.mark.parametrize("name", ["cispo", "CISPO"])
def test_a_policy_loss_is_the_same_in_capitals(name: str) -> None:
    keys = ["algorithm.compat=trl", f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.clip_ratio_high=5.0"]
    arguments = ActorUpdate(load("ppo_trainer", keys).config, width=2.0).fixed_arguments
    assert (arguments["clip_low"], arguments["clip_high"]) == (1.0, 4.0)  # TRL: ratios are at most 5


@pytest.mark.parametrize(
    ("compat", "estimator"), [("verl", "gae"), ("openrlhf", "group_norm"), ("trl", "grpo")]
)
def test_a_run_with_each_framework(overrides: list[str], compat: str, estimator: str) -> None:
    keys = [
        "algorithm.use_kl_in_reward=true",
        "reward_model.clip_range=[-5,5]",
        "trainer.total_training_steps=1",
    ]
    steps = run(overrides, f"algorithm.compat={compat}", f"algorithm.adv_estimator={estimator}", *keys)
    assert all(math.isfinite(value) for value in steps[1].values())
