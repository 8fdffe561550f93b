"""What the keys of asynchronous training amount to, and what they refuse."""

from __future__ import annotations

import pytest

from strop.config.arithmetic import plan_ppo
from strop.config.compose import load
from strop.config.derived import async_plan, rollout_correction, uses_engine_log_probs
from strop.config.rules import check

ASYNC = "trainer.async_training."
BASE = [
    "actor_rollout_ref.model.path=m",
    "data.train_files=f.parquet",
    "data.train_batch_size=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.rollout.n=8",
    "algorithm.adv_estimator=grpo",
    "trainer.save_freq=8",
]
OVER_KEY = "actor_rollout_ref.rollout.over_sampling"
OVER = f"{OVER_KEY}=1.5"
ON, CUT = f"{ASYNC}enable=true", f"{ASYNC}partial_rollout=true"


def config(*overrides: str):
    return load("ppo_trainer", [*BASE, *overrides]).config


def findings(*overrides: str):
    return [(f.level, f.key, f.message) for f in check(load("ppo_trainer", [*BASE, *overrides]))]


@pytest.mark.parametrize(
    ("overrides", "prompts", "steps", "age"),
    [
        ([], 0, 1, 0),
        ([ON], 64, 1, 1),
        ([ON, f"{ASYNC}max_policy_age=0"], 0, 1, 0),
        ([ON, f"{ASYNC}max_policy_age=3"], 128, 1, 3),
        ([ON, f"{ASYNC}staleness_threshold=0.5"], 48, 1, 0.5),
        ([ON, f"{ASYNC}staleness_threshold=0.1", f"{ASYNC}trigger_parameter_sync_step=4"], 140, 4, 0.1),
        ([ON, f"{ASYNC}staleness_threshold=0", f"{ASYNC}trigger_parameter_sync_step=2"], 64, 2, 0),
        ([CUT, f"{ASYNC}trigger_parameter_sync_step=2"], 64, 1, 1),
    ],
)
def test_two_names_of_one_bound(overrides, prompts, steps, age):
    ahead = async_plan(config(*overrides))
    assert (ahead.between_updates, ahead.sync_steps, ahead.age) == (prompts, steps, age)


def test_older_answers_are_corrected_unless_somebody_chose():
    assert rollout_correction(config()).rollout_is is None
    assert rollout_correction(config(ON)).rollout_is == "token"
    assert rollout_correction(config(CUT)).rollout_is == "token"
    assert rollout_correction(config(ON, f"{ASYNC}max_policy_age=0")).rollout_is is None
    assert (
        rollout_correction(config(ON, "algorithm.rollout_correction.rollout_is=sequence")).rollout_is
        == "sequence"
    )
    cheap = config(ON, f"{ASYNC}compute_prox_log_prob=false")
    assert rollout_correction(cheap).rollout_is is None and uses_engine_log_probs(cheap)
    naive = config(ON, f"{ASYNC}use_rollout_log_probs=false")
    assert rollout_correction(naive).rollout_is is None and not uses_engine_log_probs(naive)


def test_the_plan_says_how_far_ahead():
    rows = {name: (value, why) for name, value, why in plan_ppo(config(ON, CUT)).table()}
    assert rows["sampling"] == (
        "during training, at most 1 weight update old",
        "64 prompts from one weight update (every step) to the next, interrupted by a weight update; rollout_is=token",
    )
    assert "sampling" not in {name for name, _, _ in plan_ppo(config()).table()}


@pytest.mark.parametrize(
    ("overrides", "level", "key", "words"),
    [
        (
            [ON, f"{ASYNC}staleness_threshold=2", f"{ASYNC}max_policy_age=1"],
            "error",
            "staleness_threshold",
            ["2 and max_policy_age=1"],
        ),
        (
            [ON, f"{ASYNC}require_batches=3"],
            "error",
            "require_batches",
            ["3 mini-batches", "48 prompts", "train_batch_size=32"],
        ),
        ([ON, "data.sampler.class_path=s.py"], "error", "data.sampler.class_path", ["max_policy_age=0"]),
        (
            [ON, f"{ASYNC}trigger_parameter_sync_step=4", "trainer.test_freq=6"],
            "error",
            "trainer.test_freq",
            ["4 or 8"],
        ),
        (
            [ON, f"{ASYNC}use_rollout_log_probs=false"],
            "warning",
            "use_rollout_log_probs",
            ["as if they were new"],
        ),
        ([f"{ASYNC}staleness_threshold=0.5"], "warning", "staleness_threshold", ["enable=true"]),
        (
            [CUT, f"{ASYNC}trigger_parameter_sync_step=2"],
            "warning",
            "trigger_parameter_sync_step",
            ["enable=true"],
        ),
        (
            [ON, "actor_rollout_ref.rollout.free_cache_engine=true"],
            "warning",
            "free_cache_engine",
            ["never rests"],
        ),
        (
            [ON, "actor_rollout_ref.rollout.calculate_log_probs=false"],
            "error",
            "calculate_log_probs",
            ["compares with the engine's log-probs"],
        ),
        ([OVER, ON], "error", "over_sampling", ["1.5 with", "enable=true", f"Set {OVER_KEY}=1"]),
        ([OVER, CUT], "error", "over_sampling", ["partial_rollout=true"]),
        ([OVER, f"{ASYNC}max_policy_age=0"], "error", "over_sampling", ["at least 1"]),
        ([f"{OVER_KEY}=1.01"], "error", "over_sampling", ["1.01 times 32", "at least 1.03"]),
        (
            [OVER, "actor_rollout_ref.rollout.multi_turn.enable=true"],
            "error",
            "over_sampling",
            ["conversations", "cannot be cut"],
        ),
        ([OVER, "data.sampler.class_path=s.py"], "error", "data.sampler.class_path", ["over_sampling=1"]),
        ([OVER, f"{ASYNC}use_rollout_log_probs=false"], "warning", "use_rollout_log_probs", ["new"]),
        ([OVER, f"{ASYNC}staleness_threshold=0.5"], "warning", "staleness_threshold", ["enable=true"]),
    ],
)
def test_what_does_not_go_together(overrides, level, key, words):
    [message] = [
        message for found, where, message in findings(*overrides) if found == level and where.endswith(key)
    ]
    assert all(word in message for word in words), message


@pytest.mark.parametrize("value", ["0.5", "2.5", "nan", "much"])
def test_over_sampling_has_limits(value):
    with pytest.raises(ValueError, match="over_sampling"):
        config(f"{OVER_KEY}={value}")


def test_over_sampling_is_corrected_and_shown():
    assert findings(OVER, f"{ASYNC}max_policy_age=2") == []
    chosen = config(OVER, f"{ASYNC}max_policy_age=2")
    assert rollout_correction(chosen).rollout_is == "token"
    rows = {name: value for name, value, _ in plan_ppo(chosen).table()}
    assert rows["sampling"] == "over-sampling by 1.5, at most 2 weight updates old"


def test_a_sound_asynchronous_configuration_has_no_findings():
    assert findings(ON, CUT, f"{ASYNC}staleness_threshold=0.5", f"{ASYNC}require_batches=2") == []


def test_files_of_verl_without_a_batch_size():
    loaded = load("ppo_trainer", [*BASE, "data.train_batch_size=0", "async_training.require_batches=4", ON])
    assert loaded.config.data.train_batch_size == 64
    assert any("4 mini-batches" in notice for notice in loaded.notices)


def test_the_other_trainer_of_verl_does_not_read_v1():
    v1 = ["trainer.v1.trainer_mode=separate_async", "trainer.v1.sampler.max_off_policy_threshold=3"]
    loaded = load("ppo_trainer", [*BASE, *v1, "trainer.use_v1=False"])
    assert loaded.tree() == load("ppo_trainer", BASE).tree()
    assert any("trainer.use_v1=False" in notice for notice in loaded.notices)
    assert load("ppo_trainer", [*BASE, *v1, "trainer.use_v1=True"]).config.trainer.async_training.enable
    assert load("ppo_trainer", [*BASE, *v1]).config.trainer.async_training.max_policy_age == 3
