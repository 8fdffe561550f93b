"""Keys that once changed nothing, or changed something without saying so."""

from __future__ import annotations

from itertools import pairwise

import pytest

from strop.config.arithmetic import micro_batch_size
from strop.config.compose import load
from strop.config.rules import check
from strop.config.typed import ConfigError

ACTOR = "actor_rollout_ref.actor"


def findings(root: str, *words: str) -> dict[str, str]:
    """Key -> level of the findings."""
    return {finding.key: finding.level for finding in check(load(root, words))}


@pytest.mark.parametrize(
    ("root", "section"), [("ppo_trainer", "actor_rollout_ref.model"), ("sft_trainer", "model")]
)
def test_dropout_is_refused_because_no_layer_has_it(root, section):
    key = f"{section}.override_config.attention_dropout"
    assert findings(root, f"+{key}=0.1")[key] == "error"
    assert key not in findings(root, f"+{key}=0.")


def test_forward_passes_follow_the_micro_batch_of_the_update():
    config = load(
        "ppo_trainer", [f"{ACTOR}.ppo_micro_batch_size_per_gpu=3", "critic.ppo_micro_batch_size_per_gpu=5"]
    ).config
    group = config.actor_rollout_ref
    assert micro_batch_size(group.rollout, "log_prob_micro_batch_size", 100, 1) == 3
    assert micro_batch_size(group.ref, "log_prob_micro_batch_size", 100, 1) == 3
    assert micro_batch_size(config.critic, "forward_micro_batch_size", 100, 1) == 5


def test_the_old_form_of_a_forward_micro_batch_is_not_hidden_by_the_update():
    words = [
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size=16",
    ]
    rollout = load("ppo_trainer", words).config.actor_rollout_ref.rollout
    assert micro_batch_size(rollout, "log_prob_micro_batch_size", 100, 2) == 8


@pytest.mark.parametrize("name", ["reward", "none"])
def test_the_return_itself_is_an_advantage(name):
    loaded = load("ppo_trainer", [f"algorithm.adv_estimator={name}"])
    assert loaded.config.algorithm.adv_estimator == "reinforce"
    assert loaded.notices == [f"algorithm.adv_estimator={name} is now algorithm.adv_estimator=reinforce."]


@pytest.mark.parametrize("key", ["algorithm.kl_penalty", f"{ACTOR}.kl_loss_type"])
def test_the_full_kl_is_no_choice_and_says_why(key):
    with pytest.raises(ConfigError, match="logits of both models"):
        load("ppo_trainer", [f"{key}=full"])
    with pytest.raises(ConfigError) as refused:
        load("ppo_trainer", [f"{key}=fool"])
    assert "full" not in str(refused.value)


def test_validation_that_samples_without_do_sample_says_so():
    val = "actor_rollout_ref.rollout.val_kwargs"
    assert findings("ppo_trainer", f"{val}.temperature=0.7")[f"{val}.do_sample"] == "warning"
    assert f"{val}.do_sample" not in findings(
        "ppo_trainer", f"{val}.temperature=0.7", f"{val}.do_sample=true"
    )


def test_a_reward_model_that_is_not_enabled_says_so():
    key = "reward_model.model.path"
    assert findings("ppo_trainer", f"{key}=m")[key] == "warning"
    assert key not in findings("ppo_trainer", f"{key}=m", "reward_model.enable=true")


def test_the_stable_share_of_wsd_is_a_key():
    import torch

    from strop.backends.optimizer import make_schedule

    words = ["optim.lr_scheduler=wsd", "optim.wsd_stable_ratio=0.5", "optim.total_training_steps=10"]
    optim = load("sft_trainer", [*words, "optim.lr_warmup_steps=0"]).config.optim
    optim.lr_scheduler_type = optim.lr_scheduler
    schedule = make_schedule(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), optim)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    assert rates[:6] == [1.0] * 6 and all(a > b for a, b in pairwise(rates[5:]))


def test_the_notice_about_a_free_section_names_the_keys_that_have_no_effect():
    """With rank and alpha in use, `model.lora has no effect` would be wrong."""
    model = "actor_rollout_ref.model"
    said = load("ppo_trainer", [f"{model}.lora.rank=8", f"{model}.lora.merge=true"]).notices
    assert any(text.startswith(f"{model}.lora.merge has no effect: ") for text in said)
    assert not any(text.startswith(f"{model}.lora has no effect") for text in said)


def test_two_names_of_the_reward_manager_that_differ():
    key = "reward_manager.name"
    older = "reward_model.reward_manager=dapo"
    assert findings("ppo_trainer", older, "reward.reward_manager.name=naive")[key] == "error"
    for words in ([older], [older, f"{key}=dapo"], ["reward.reward_manager.name=dapo"]):
        assert key not in findings("ppo_trainer", *words)
