"""With one update per step, importance weights come from the passes of the update, and no pass is made for them."""

from __future__ import annotations

import sys

import pytest

from strop.config.compose import load
from strop.config.derived import needs_old_log_probs
from strop.ppo import experience
from strop.ppo.experience import ExperienceFacts
from tests.ppo.runs import run, same, weights

CORRECTION = "algorithm.rollout_correction"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count("7") / 4 + len(solution_str) / 100
"""
PLUGIN = """
from strop.catalog import ADVANTAGES

@ADVANTAGES.register("heavier")
def heavier(*, rewards, mask, TAKEN):
    return rewards.sum(-1, keepdim=True) * mask * WEIGHTS
"""


@pytest.fixture
def quantised(overrides, tmp_path):
    """Two steps of one update in two micro-batches, with samples of a policy that is another one."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    return [
        *overrides,
        f"custom_reward_function.path={reward}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=6",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.quantization=int8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=2",
    ]


@pytest.mark.parametrize(
    "correction",
    [[], ["rollout_is=sequence"], ["rollout_is=token", "rollout_is_threshold=0.999_1.001"]],
    ids=lambda settings: "+".join(settings) or "default",
)
def test_the_weights_are_those_of_a_pass_before_the_update(quantised, tmp_path, monkeypatch, correction):
    """All rows take part, so that statistics of weights are over the same rows."""
    settings = [*quantised, "actor_rollout_ref.actor.skip_zero_advantages=false"]
    settings += [f"{CORRECTION}.{setting}" for setting in correction]
    now = run(settings, f"trainer.default_local_dir={tmp_path / 'now'}")
    monkeypatch.setattr(experience, "needs_old_log_probs", lambda config, on_policy: True)
    before = run(settings, f"trainer.default_local_dir={tmp_path / 'before'}")
    assert "timing_s/old_log_prob" in before[2] and "timing_s/old_log_prob" not in now[2]
    for step in (1, 2):
        for name in ("actor/grad_norm", "actor/pg_loss"):
            assert now[step][name] == pytest.approx(before[step][name], rel=1e-5, abs=1e-7), (step, name)
        names = {name for name in before[step] if name.startswith(("rollout_corr/", "training/rollout_"))}
        assert names and names <= now[step].keys()
        for name in names:
            assert now[step][name] == pytest.approx(before[step][name], rel=1e-4, abs=1e-6), (step, name)
    assert now[2]["training/rollout_logprobs_diff_max"] > 1e-3, "the engine has other weights"
    kept, made = weights(tmp_path / "now", 2), weights(tmp_path / "before", 2)
    assert all((kept[name] - made[name]).abs().max() < 1e-5 for name in made)


def test_rows_without_gradient_are_skipped_as_before(quantised, tmp_path, monkeypatch):
    now = run(quantised, f"trainer.default_local_dir={tmp_path / 'now'}")
    monkeypatch.setattr(experience, "needs_old_log_probs", lambda config, on_policy: True)
    before = run(quantised, f"trainer.default_local_dir={tmp_path / 'before'}")
    for step in (1, 2):
        assert now[step]["actor/active_rows"] == before[step]["actor/active_rows"] < 1
        assert now[step]["actor/grad_norm"] == pytest.approx(before[step]["actor/grad_norm"], rel=1e-5)


def test_without_the_weights_another_policy_is_trained(quantised, tmp_path):
    """The comparison above would see weights that are left out."""
    run(quantised, f"trainer.default_local_dir={tmp_path / 'weighted'}")
    off = f"{CORRECTION}.rollout_is_threshold=null"
    steps = run(quantised, off, f"trainer.default_local_dir={tmp_path / 'plain'}")
    assert "rollout_corr/rollout_is_mean" not in steps[2] and "timing_s/old_log_prob" not in steps[2]
    assert not same(weights(tmp_path / "weighted", 2), weights(tmp_path / "plain", 2))


@pytest.mark.parametrize(
    ("setting", "before"),
    [
        ("trainer.total_training_steps=2", False),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=2", True),
        (f"{CORRECTION}.rollout_is_batch_normalize=true", True),
        ("algorithm.adv_estimator=optimal_token_baseline", True),
    ],
)
def test_what_needs_a_pass_before_the_update(quantised, setting, before):
    settings = [*quantised, f"{CORRECTION}.rollout_is=token", setting]
    steps = run(settings, "trainer.save_freq=-1")
    assert ("timing_s/old_log_prob" in steps[2]) == before
    assert steps[2]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.05)


def test_rejection_and_dropout_need_one_too(quantised):
    def needs(*more):
        return ExperienceFacts.of(load("ppo_trainer", [*quantised, *more]).config, True).needs_old_log_probs

    assert not needs()
    assert needs(f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0")
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear"]
    assert not needs(*lora)
    assert needs(*lora, "actor_rollout_ref.model.lora_dropout=0.1")
    assert needs("algorithm.use_kl_in_reward=true")


@pytest.mark.parametrize(
    ("taken", "weights"),
    [("rollout_is_weights=None", "rollout_is_weights"), ("**given", 'given["rollout_is_weights"]')],
)
def test_an_estimator_of_a_plugin_gets_the_weights(quantised, tmp_path, monkeypatch, taken, weights):
    """Checks and planner know of the pass for it."""
    code = PLUGIN.replace("TAKEN", taken).replace("WEIGHTS", weights)
    (tmp_path / "heavier_estimator.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    plugin = ["plugins=[heavier_estimator]", "algorithm.adv_estimator=heavier", "trainer.save_freq=-1"]
    try:
        steps = run([*quantised, *plugin])
    finally:
        sys.modules.pop("heavier_estimator", None)
    assert "timing_s/old_log_prob" in steps[2] and steps[2]["actor/grad_norm"] > 0
    config = load("ppo_trainer", [*quantised, *plugin]).config
    assert needs_old_log_probs(config, True)
    assert not needs_old_log_probs(load("ppo_trainer", quantised).config, True)
