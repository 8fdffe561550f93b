"""Training with an engine outside the trainer's module: its log-probs must be the trainer's, step after step."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer
from tests.ppo.runs import run
from tests.rollout import engines
from tests.rollout.sglang_double import Double

ROLLOUT = "actor_rollout_ref.rollout"


def drift_stays_small(steps: dict[int, dict[str, float]]) -> None:
    trained = [numbers for step, numbers in steps.items() if step > 0]
    assert len(trained) == 4
    for numbers in trained:
        assert numbers["actor/grad_norm"] > 0
        assert numbers["training/rollout_logprobs_diff_max"] < 1e-4
        assert numbers["training/rollout_actor_probs_pearson_corr"] > 0.9999
        assert numbers["rollout/tokens"] > 0


def test_sglang_samples_from_the_weights_of_each_step(task: Path, overrides: list[str]) -> None:
    double = Double(AutoModelForCausalLM.from_pretrained(task / "model"))
    steps = run(overrides, f"{ROLLOUT}.name=sglang", f"+{ROLLOUT}.engine_kwargs.sglang.url={double.url}")
    drift_stays_small(steps)
    assert double.weight_version == "4"
    double.close()


@pytest.mark.vllm
def test_vllm_samples_from_the_weights_of_each_step(overrides: list[str], tmp_path: Path) -> None:
    """PPO with a critic; the heads of the model are as wide as vLLM wants them, its embeddings tied."""
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=128, layers=2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    steps = run(
        overrides,
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "algorithm.adv_estimator=gae",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.enforce_eager=true",
        f"{ROLLOUT}.dtype=float32",  # the default, bf16, is not comparable to fp32 training at 1e-4
        f"+{ROLLOUT}.engine_kwargs.vllm.python={engines.vllm_python()}",
    )
    drift_stays_small(steps)
