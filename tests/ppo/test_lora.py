"""Adapters through the loop: the base is the reference, the engine samples with them, a resume is exact."""

from __future__ import annotations

import pytest

from strop.run.checkpoint.store import load as load_checkpoint
from tests.ppo.runs import run, same, weights

SEVENS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count("7") / 4
"""


@pytest.fixture
def adapted(overrides, tmp_path):
    reward = tmp_path / "sevens.py"
    reward.write_text(SEVENS)
    return [
        *overrides,
        f"custom_reward_function.path={reward}",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.optim.lr=2e-2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.test_freq=-1",
    ]


def test_the_reference_is_the_actor_without_adapters(adapted):
    steps = run(adapted)
    assert steps[1]["actor/kl_loss"] == 0.0
    assert steps[4]["actor/kl_loss"] > 1e-5


def test_the_engine_samples_with_the_adapters(adapted):
    steps = run(adapted)
    assert steps[4]["actor/kl_loss"] > 1e-5  # so that sampling without them would show
    assert steps[4]["training/rollout_logprobs_diff_max"] < 1e-4


def test_only_adapters_are_saved_and_a_resume_is_exact(adapted, tmp_path):
    straight = run(adapted, f"trainer.default_local_dir={tmp_path}/whole")
    cut = f"trainer.default_local_dir={tmp_path}/cut"
    run(adapted, cut, "trainer.total_training_steps=2")
    resumed = run(adapted, cut)
    assert all("lora_" in name for name in weights(tmp_path / "cut", 4))
    assert same(weights(tmp_path / "whole", 4), weights(tmp_path / "cut", 4))
    assert resumed[4]["actor/kl_loss"] == straight[4]["actor/kl_loss"]
    optimizer = load_checkpoint(tmp_path / "cut" / "global_step_4")["actor/optimizer"]
    assert optimizer and all("lora_" in name for name in optimizer)


def test_adapters_resume_with_their_scale_only(overrides):
    lora = [*overrides, "actor_rollout_ref.model.lora_rank=4"]
    run(lora, "trainer.total_training_steps=2")
    with pytest.raises(ValueError, match=r"lora_alpha was 16.* and is 64.*Set 16.* again"):
        run(lora, "actor_rollout_ref.model.lora_alpha=64")
    with pytest.raises(
        ValueError, match=r"no 'critic/model'.* Resume from a checkpoint that was saved with it"
    ):
        run(lora, "algorithm.adv_estimator=gae")
    assert max(run(lora)) == 4
