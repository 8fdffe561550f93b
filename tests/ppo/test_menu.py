"""Everything on the menu goes through the loop: each estimator, each policy loss, each correction, on- and off-policy."""

from __future__ import annotations

import math
import re

import pytest

from strop.catalog import ADVANTAGES, POLICY_LOSSES
from strop.ppo.collect import Collector
from tests.ppo.runs import run, same, weights

PARTS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    sevens, short = solution_str.count("7") / 4, float(len(solution_str) < 3)
    return {"score": sevens + short, "sevens": sevens, "short": short}
"""


@pytest.fixture
def short(overrides, tmp_path):
    """Two steps of two updates each, four prompts, three samples, with a reward that differs between samples."""
    reward = tmp_path / "parts.py"
    reward.write_text(PARTS)
    return [
        *overrides,
        f"custom_reward_function.path={reward}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]


def sound(steps):
    """Two steps with finite numbers in which the actor moved."""
    assert set(steps) == {1, 2}
    for metrics in steps.values():
        strange = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        assert not strange, strange
        assert metrics["actor/grad_norm"] > 0 and metrics["actor/skipped_updates"] == 0
    return steps


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES.names()))
def test_every_estimator(short, estimator):
    steps = sound(run(short, f"algorithm.adv_estimator={estimator}"))
    assert ("critic/vf_loss" in steps[2]) == ("values" in ADVANTAGES.entry(estimator).facts["needs"])


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES.names()))
def test_every_policy_loss(short, loss):
    name = "algorithm.rollout_correction.bypass_mode=true"
    sound(
        run(short, name if loss == "bypass_mode" else f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}")
    )


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    "settings",
    [
        ["rollout_is=token"],
        ["rollout_is=sequence", "rollout_is_batch_normalize=true"],
        ["rollout_is=token", "rollout_is_threshold=0.5_5.0"],
        ["rollout_rs=token_k1", "rollout_rs_threshold=0.5_2.0"],
        ["rollout_rs='seq_mean_k3,token_k2'", "rollout_rs_threshold='1.0,1.0'"],
        ["bypass_mode=true", "loss_type=reinforce", "rollout_is=token"],
        ["bypass_mode=true", "loss_type=ppo_clip", "rollout_rs=seq_mean_k3", "rollout_rs_threshold=1.0"],
    ],
    ids=lambda settings: "+".join(settings),
)
def test_every_correction_of_the_rollout(short, settings):
    steps = sound(run(short, *(f"{CORRECTION}.{setting}" for setting in settings)))
    wanted = (
        "rollout_corr/rollout_rs_masked_fraction"
        if "rollout_rs" in str(settings)
        else "rollout_corr/rollout_is_mean"
    )
    if "rollout_is=sequence" in settings:
        wanted = "rollout_corr/rollout_is_seq_mean"
    assert wanted in steps[2]


def test_bypass_mode_needs_no_pass_for_old_log_probs(short):
    on_policy = ["actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    steps = sound(run(short, *on_policy, f"{CORRECTION}.bypass_mode=true"))
    assert 0 < steps[2]["training/rollout_logprobs_diff_max"] < 1e-4  # of the update
    assert abs(steps[2]["actor/ppo_kl"]) < 1e-4
    assert steps[2]["actor/entropy"] == pytest.approx(steps[2]["actor/entropy_loss"])  # token-mean of both


def test_the_parts_of_a_score_reach_gdpo(short, tmp_path):
    def grad(name, *more):
        folder = f"trainer.default_local_dir={tmp_path}/{name}"
        return run(short, "algorithm.adv_estimator=gdpo", folder, *more)[1]["actor/grad_norm"]

    keys = "algorithm.gdpo_reward_keys=[sevens,short]"
    plain, both = grad("plain"), grad("both", keys)
    assert both != plain
    assert grad("even", keys, "algorithm.gdpo_reward_weights=[1,1]") == both
    assert grad("uneven", keys, "algorithm.gdpo_reward_weights=[1,5]") != both


def test_a_part_that_the_scorer_does_not_report_is_named(short):
    with pytest.raises(ValueError, match=re.escape("names 'colour'") + ".*score, sevens, short"):
        run(short, "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[colour]")


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_pf_ppo_learns_from_rows_drawn_by_score(short, method):
    steps = sound(run(short, "algorithm.use_pf_ppo=true", f"algorithm.pf_ppo.reweight_method={method}"))
    assert all(0 < steps[step]["pf_ppo/rows_drawn"] < 1 for step in steps)


def test_pf_ppo_draws_the_same_rows_after_a_resume(short, tmp_path):
    base = [*short, "algorithm.use_pf_ppo=true", "algorithm.adv_estimator=gae", "trainer.save_freq=1"]
    run(base, f"trainer.default_local_dir={tmp_path}/whole")
    cut = f"trainer.default_local_dir={tmp_path}/cut"
    run(base, cut, "trainer.total_training_steps=1")
    run(base, cut)
    assert same(weights(tmp_path / "whole", 2), weights(tmp_path / "cut", 2))


def test_on_policy_drift_is_known_even_of_resampled_rows(short):
    steps = run(short, "actor_rollout_ref.actor.ppo_mini_batch_size=4", "algorithm.use_pf_ppo=true")
    assert steps[2]["training/rollout_logprobs_diff_max"] < 1e-4


@pytest.mark.parametrize("free", ["true", "false"])
def test_the_engine_sleeps_while_the_models_learn(short, monkeypatch, free):
    seen = []
    original = Collector.close
    monkeypatch.setattr(Collector, "close", lambda self: (seen.append("closed"), original(self))[1])
    import strop.rollout.native.engine as native

    for name in ("wake", "sleep"):
        real = getattr(native.NativeEngine, name)
        monkeypatch.setattr(
            native.NativeEngine, name, lambda self, n=name, r=real: (seen.append(n), r(self))[1]
        )
    run(short, f"actor_rollout_ref.rollout.free_cache_engine={free}")
    assert seen == [*(["wake", "sleep"] if free == "true" else ["wake"]) * 2, "closed"]


def test_lengths_per_device_are_reported(short):
    steps = run(short)
    assert (
        steps[1]["global_seqlen/min"]
        == steps[1]["global_seqlen/balanced_max"]
        == steps[1]["perf/total_num_tokens"]
    )


MODEL, ROLLOUT, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    "settings",
    [
        [f"{ROLLOUT}.name=hf"],
        [f"{ROLLOUT}.name=hf", f"{MODEL}.lora_rank=4", f"{MODEL}.enable_gradient_checkpointing=true"],
        [f"{MODEL}.use_remove_padding=false"],
        [f"{MODEL}.enable_gradient_checkpointing=true", f"{MODEL}.lora_rank=4"],
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.entropy_coeff=0.01"],
        [f"{ACTOR}.use_rollout_log_probs=true"],
        [f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.lr_warmup_steps=0"],
        ["data.filter_overlong_prompts=true"],
        ["data.val_files=null"],
        ["data.train_max_samples=8", "trainer.total_training_steps=null", "trainer.total_epochs=1"],
        ["reward_model.reward_manager=prime"],
        [
            "reward_model.reward_manager=dapo",
            "reward_model.overlong_buffer.enable=true",
            "reward_model.overlong_buffer.len=2",
        ],
        ["algorithm.compat=verl"],
        ["algorithm.compat=openrlhf"],
    ],
    ids=lambda settings: "+".join(settings),
)
def test_other_ways_to_run(short, settings):
    steps = sound(run(short, *settings))
    if f"{ACTOR}.use_rollout_log_probs=true" not in settings:
        assert steps[2]["training/rollout_logprobs_diff_max"] < 1e-4


def test_a_critic_with_adapters_trains_its_head_whole(short, tmp_path):
    from strop.run.checkpoint.store import load as load_checkpoint

    steps = sound(
        run(short, "algorithm.adv_estimator=gae", "critic.model.lora_rank=4", "trainer.save_freq=1")
    )
    assert steps[2]["critic/grad_norm"] > 0
    saved = [load_checkpoint(tmp_path / "run" / f"global_step_{step}")["critic/model"] for step in (1, 2)]
    heads = [name for name in saved[0] if "lora_" not in name]
    assert len(heads) == 1 and heads[0].endswith("score.weight")
    assert not (saved[0][heads[0]] == saved[1][heads[0]]).all()
