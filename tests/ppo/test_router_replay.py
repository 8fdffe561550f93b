"""Runs of a mixture of experts that replay the experts of the rollout engine (router_replay.mode=R3)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from strop.config.compose import load
from strop.ppo.build import build_ppo
from strop.quickstart.tiny_model import tiny_tokenizer
from tests.ppo.runs import metrics, run, same, weights

MODE = "actor_rollout_ref.actor.router_replay.mode"
DRIFT = "training/rollout_logprobs_diff_mean"


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    """A small Qwen3-MoE whose routers are decided by rounding now and then."""
    folder = tmp_path_factory.mktemp("experts")
    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def words(overrides, experts) -> list[str]:
    return [
        *overrides,
        f"actor_rollout_ref.model.path={experts}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_response_length=12",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]


def test_with_an_engine_of_the_same_precision_it_is_r2(words, tmp_path):
    """Engine and trainer choose the same experts, so R3 has the numbers of R2, and others than no replay."""
    steps = {}
    for mode in ("disabled", "R2", "R3"):
        more = [f"{MODE}={mode}", f"trainer.default_local_dir={tmp_path}/{mode}"]
        steps[mode] = run(words, *more, "trainer.total_training_steps=1", "trainer.save_freq=-1")[1]
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
        assert steps["R3"][name] == pytest.approx(steps["R2"][name], rel=1e-4, abs=1e-6), name
    # Measured behind a step of Adam, which amplifies roundings. Without replay it is ten times as large.
    assert steps["R3"]["actor/ppo_kl"] == pytest.approx(steps["R2"]["actor/ppo_kl"], rel=2e-3)
    assert abs(steps["disabled"]["actor/pg_loss"] - steps["R2"]["actor/pg_loss"]) > 1e-4


def test_with_a_quantised_engine_old_log_probs_are_closer_to_the_sampled_ones(words, tmp_path):
    """An engine in 8 bits sends some tokens to other experts. With R3 about a quarter of the difference is
    left."""
    drift = {}
    for mode in ("disabled", "R3"):
        more = [f"{MODE}={mode}", f"trainer.default_local_dir={tmp_path}/{mode}"]
        more += ["actor_rollout_ref.rollout.quantization=int8", "trainer.save_freq=-1"]
        drift[mode] = run(words, *more, "trainer.total_training_steps=1")[1][DRIFT]
    assert 0 < drift["R3"] < 0.5 * drift["disabled"]


def test_a_killed_run_resumes_with_the_experts_of_unfinished_samples(words, tmp_path):
    """Prompts that are sampled in part wait in the checkpoint, with their experts, and are continued under
    newer weights."""
    more = [
        f"{MODE}=R3",
        "actor_rollout_ref.rollout.over_sampling=1.5",
        "actor_rollout_ref.rollout.max_num_seqs=20",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
    ]
    for name, ends in {"whole": [3], "killed": [1, 3]}.items():
        for last in ends:
            loaded = load("ppo_trainer", [*words, *more, f"trainer.default_local_dir={tmp_path}/{name}"])
            trainer = build_ppo(loaded)
            trainer.total_steps = last  # the plan still has three steps, as in a run that is killed
            trainer.fit()
    found = metrics(tmp_path / "whole")
    assert found[1]["over_sampling/unfinished_tokens"] > 0
    assert same(weights(tmp_path / "whole", 3), weights(tmp_path / "killed", 3))


@pytest.mark.slow
def test_from_the_command_line(words, tmp_path):
    command = [sys.executable, "-m", "strop.cli", "ppo", *words, f"{MODE}=R3"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(command, check=True, env=environment, timeout=600)
    steps = metrics(tmp_path / "run")
    assert steps[4]["training/rollout_logprobs_diff_max"] < 1e-3
