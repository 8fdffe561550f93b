"""Learning rates of Megatron's keys, against numbers of megatron-core's own scheduler (0.16.1)."""

from __future__ import annotations

import pytest
import torch

from strop.backends.megatron.schedules import learning_rate, megatron_schedule
from strop.config.compose import load
from strop.config.rules import check
from strop.config.schema.model import OptimConfig

OPTIM = "actor_rollout_ref.actor.optim"


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("last", ["exponential", "linear", "cosine", "minus_sqrt"])
def test_rates_are_those_of_megatron_core(style, last):
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    group = {"params": [], "lr": 1e-3, "weight_decay": 0.1}
    optimizer = type("Optimizer", (), {"param_groups": [group]})()
    theirs = scheduler(
        optimizer,
        *(1e-5, 1e-3, 1e-4, 4, 20, style, 0.1, 0.1, 20, "constant"),
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=6,
        lr_wsd_decay_style=last,
    )
    optim = OptimConfig(
        lr=1e-3,
        lr_warmup_init=1e-5,
        min_lr=1e-4,
        lr_warmup_steps=4,
        lr_decay_steps=20,
        lr_decay_style=style,
        lr_wsd_decay_style=last,
        lr_wsd_decay_steps=6,
    )
    for step in range(20):
        assert learning_rate(step, optim) == pytest.approx(group["lr"], rel=1e-9), step
        theirs.step(increment=1)


def test_a_schedule_of_the_usual_keys_stays():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    optim = OptimConfig(lr=1.0, lr_scheduler_type="cosine", total_training_steps=10, lr_warmup_steps=2)
    schedule = megatron_schedule(optimizer, optim)
    assert schedule.get_last_lr() == [0.5]
    optim = OptimConfig(lr=1.0, lr_decay_style="linear", total_training_steps=10, lr_warmup_steps=2)
    assert megatron_schedule(optimizer, optim).get_last_lr() == [0.0]


def test_keys_of_another_schedule_are_reported():
    found = check(load("ppo_trainer", [f"{OPTIM}.lr_decay_style=cosine"]))
    assert any(
        f.key == f"{OPTIM}.lr_decay_style" and "no effect with strategy=fsdp" in f.message for f in found
    )
    both = [
        "actor_rollout_ref.actor.strategy=megatron",
        f"{OPTIM}.min_lr=1e-7",
        f"{OPTIM}.lr_scheduler_type=cosine",
    ]
    assert any(f.key == f"{OPTIM}.min_lr" and f.level == "error" for f in check(load("ppo_trainer", both)))
