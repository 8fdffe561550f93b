"""From a configuration back to OpenRLHF flags."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.compose import load
from strop.config.openrlhf.convert import convert
from strop.config.openrlhf.reverse import convert_to_openrlhf, to_openrlhf
from strop.config.openrlhf.table import VERBS, names_of
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys
from tests.config.openrlhf_commands import (
    ACTOR,
    DPO_COMMAND,
    G2_COMMAND,
    G3_COMMAND,
    RM_COMMAND,
    ROLLOUT,
    SFT_COMMAND,
    WORKED_EXAMPLE,
    nested,
    sample_words,
    values,
)


@pytest.mark.parametrize(
    "command", [WORKED_EXAMPLE, G2_COMMAND, G3_COMMAND, SFT_COMMAND, RM_COMMAND, DPO_COMMAND]
)
def test_round_trip(command):
    there = convert([command])
    reverse = to_openrlhf(nested(values(there)), there.verb)
    again = values(convert(reverse.arguments()))
    ours = {key.path: key.default for key in keys(ROOTS[f"{there.verb}_trainer"])}
    lost = {key for key, _, _ in reverse.unexpressed}
    # One budget replaces the two caps of the older generations, and a lone switch says less than its key.
    lost |= {"data.max_prompt_length", "data.truncation"} if "prompt_max_len" in command else set()
    for key, value in values(there).items():
        if key not in lost:
            assert again.get(key, ours.get(key)) == value, key


_USES = st.sampled_from([(verb, name) for verb in VERBS for name in names_of(verb)])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(VERBS), st.lists(_USES, max_size=6))
def test_random_flags_come_back(verb, uses):
    words = [
        word for owner, name in uses if owner == verb for word in sample_words(names_of(verb)[name][0], name)
    ]
    try:
        there = convert([{"ppo": "train_ppo_ray"}.get(verb, f"train_{verb}"), *words])
    except ValueError:
        return
    reverse = to_openrlhf(nested(values(there)), verb)
    again, lost = values(convert(reverse.arguments())), {key for key, _, _ in reverse.unexpressed}
    assert {
        key: value
        for key, value in values(there).items()
        if key in again and key not in lost and again[key] != value
    } == {}


def test_a_whole_configuration_goes_back():
    overrides = [
        "actor_rollout_ref.model.path=Qwen/Qwen3-4B", "data.train_files=[a.parquet,b.parquet]", "data.train_batch_size=256",
        f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_mini_batch_size=64", "algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=true",
        "trainer.n_gpus_per_node=8", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{ROLLOUT}.top_k=50",
        "trainer.critic_warmup=5", "trainer.logger=[console,mlflow]",
    ]  # fmt: skip
    loaded = load("ppo_trainer", overrides)
    reverse = to_openrlhf(loaded.tree(), "ppo", load("ppo_trainer").tree())
    flags = reverse.flags
    assert (
        flags["train.batch_size"] == 256
        and flags["rollout.batch_size"] == 256
        and flags["rollout.n_samples_per_prompt"] == 4
    )
    assert (
        flags["algo.advantage.estimator"] == "group_norm"
        and flags["data.prompt_dataset"] == "a.parquet,b.parquet"
    )
    assert (
        flags["algo.kl.use_loss"] is True
        and flags["algo.kl.estimator"] == "k3"
        and flags["algo.kl.init_coef"] == 0.001
    )
    assert (
        flags["data.max_len"] == 1024
        and flags["rollout.max_new_tokens"] == 512
        and flags["critic.freezing_steps"] == 3
    )
    assert flags["actor.dual_clip"] == 3.0 and flags["vllm.num_engines"] == 8
    lost = {key for key, _, _ in reverse.unexpressed}
    assert {f"{ACTOR}.loss_agg_mode", f"{ROLLOUT}.top_k", "trainer.logger"} <= lost
    assert len(lost) < 12, lost
    assert convert(reverse.arguments())
    assert (
        "--algo.advantage.estimator group_norm" in reverse.render() and "# trainer.logger" in reverse.render()
    )


@pytest.mark.parametrize("verb", VERBS)
def test_our_defaults_go_back_and_forth(verb):
    tree = load(f"{verb}_trainer").tree()
    assert convert(to_openrlhf(tree, verb, tree).arguments()).verb == verb


def test_back_for_an_unknown_verb():
    with pytest.raises(ValueError, match="no trainer for 'kto'"):
        to_openrlhf({}, "kto")


def test_what_cannot_be_said_is_reported():
    config = nested(
        {"algorithm.adv_estimator": "remax", "algorithm.use_kl_in_reward": True, f"{ACTOR}.use_kl_loss": True}
    )
    reasons = {key: reason for key, _, reason in to_openrlhf(config).unexpressed}
    assert "'remax' has no equivalent" in reasons["algorithm.adv_estimator"]
    assert "either in the reward or in the loss" in reasons[f"{ACTOR}.use_kl_loss"]


RUN = ["actor_rollout_ref.model.path=m", "data.train_files=t.parquet", "data.val_files=v.parquet"]
RUN += ["data.train_batch_size=32", f"{ROLLOUT}.n=8", "algorithm.adv_estimator=grpo"]


@pytest.mark.parametrize("wrong", [f"{ACTOR}.ppo_mini_batch_size=256", f"{ROLLOUT}.temperature=0"])
def test_what_check_refuses_is_not_converted(wrong):
    """A mini-batch of 256 prompts in a step of 32 once became --train.batch_size 2048 for 256 samples."""
    small = [*RUN, f"{ACTOR}.ppo_mini_batch_size=16"]
    with pytest.raises(ValueError, match=r"cannot run, so it is not converted:\n  actor_rollout_ref"):
        convert_to_openrlhf(load("ppo_trainer", [*small, wrong]), {})


def test_what_check_accepts_is_converted_also_without_its_loggers():
    words = [*RUN, f"{ACTOR}.ppo_mini_batch_size=8", "trainer.logger=[console,wandb]"]
    flags = convert_to_openrlhf(load("ppo_trainer", words), {}).flags
    assert (flags["rollout.batch_size"], flags["train.batch_size"]) == (32, 64)
    assert flags["logger.wandb.key"] == "True"
