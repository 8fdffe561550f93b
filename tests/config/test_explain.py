"""The schema for people: every key is documented once, and shown files load again."""

from __future__ import annotations

import pytest
import yaml

from strop.config.aliases import flatten
from strop.config.compose import load
from strop.config.explain import explain, show
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys


@pytest.mark.parametrize("root", ROOTS)
def test_every_key_is_documented(root):
    undocumented = [key.path for key in keys(ROOTS[root]) if len(key.doc) < 4]
    assert not undocumented


@pytest.mark.parametrize("root", ROOTS)
def test_what_is_shown_loads_again_unchanged(root, tmp_path):
    first = load(
        root,
        ["trainer.n_gpus_per_node=2"]
        if root not in ("evaluation", "reward_server", "training_service")
        else [],
    ).tree()
    file = tmp_path / "shown.yaml"
    file.write_text(show(root, first))
    assert flatten(load(root, config=str(file)).tree()) == flatten(first)
    assert "# " in file.read_text() and yaml.safe_load(file.read_text())


def test_explain_a_short_key_names_the_long_one():
    assert "see also:  actor_rollout_ref.rollout.n\n" in explain("rollout.n")
    assert "see also" not in explain("actor_rollout_ref.rollout.n")


def test_explain_one_key():
    text = explain("actor_rollout_ref.actor.ppo_mini_batch_size")
    for words in (
        "PROMPTS per optimizer update",
        "default:   256",
        "whole number",
        "train.batch_size",
        "config/arithmetic.py",
    ):
        assert words in text


def test_explain_says_where_a_key_has_another_default_or_meaning():
    text = explain("data.train_batch_size")
    assert "default:   1024\n" in text
    assert "in sft_trainer (default 256): Rows per optimizer update, over all devices.\n" in text
    assert "in rm_trainer (default 128): PAIRS per optimizer update, over all devices.\n" in text
    assert "whole number or text, default -1): Save a checkpoint every N STEPS" in explain(
        "trainer.save_freq"
    )
    assert "\nin " not in explain("trainer.project_name")


def test_explain_understands_old_names_and_openrlhf_flags():
    assert explain("trainer.val_generations_to_log_to_wandb").startswith("trainer.log_val_generations")
    assert explain("--rollout.n_samples_per_prompt").startswith("actor_rollout_ref.rollout.n")


def test_explain_says_why_a_key_does_nothing():
    assert "none; files are read once" in explain("data.use_shm")


@pytest.mark.parametrize(
    "short, key",
    [
        ("clip_ratio", "actor_rollout_ref.actor.clip_ratio"),
        ("actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("use_kl_loss", "actor_rollout_ref.actor.use_kl_loss"),
        ("save_freq", "trainer.save_freq"),
    ],
)
def test_explain_takes_the_end_of_a_key(short, key):
    assert explain(short) == explain(key) and explain(key).startswith(f"{key}\n")


def test_explain_lists_the_keys_with_the_same_end():
    text = explain("lora_rank")
    assert text.startswith("4 keys end in lora_rank;")
    for line in (
        "actor_rollout_ref.model.lora_rank: Rank of LoRA adapters",
        "critic.model.lora_rank: Rank",
        "reward_model.model.lora_rank: no effect: the reward model is not trained",
        "model.lora_rank: Rank",
    ):
        assert f"\n{line}" in text


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.mtp.enable_train", "model.mtp.enable_rollout"])
def test_explain_says_what_mtp_heads_can_do(key):
    text = explain(key)
    assert "training of multi-token prediction heads is not supported" in text
    assert "actor_rollout_ref.rollout.speculation.mtp" in text


def test_explain_suggests():
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.actor\.clip_ratio"):
        explain("actor_rollout_ref.actor.clip_ration")


def test_the_short_name_of_a_key_of_training_is_explained_as_training_first():
    """`rollout.n` is a key of generation, too; most who ask about it train."""
    text = explain("rollout.n")
    assert text.startswith("actor_rollout_ref.rollout.n\n")
    assert text.index("found in:  ppo_trainer") < text.index("found in:  generation")
    assert explain("data.prompt_key").count("found in:") == 1
    assert explain("actor_rollout_ref.rollout.n").count("found in:") == 1
