"""Every verb with the defaults of the schema: nothing is set but paths and sizes.

Gradient checkpointing, dtype, attention, packing and the engine are what a user gets. Runs on the CPU in
`make test`, and on a GPU in `make test-gpu`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from strop.cli import dispatch
from strop.data.make import arithmetic, write
from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer
from tests.ppo.runs import metrics

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, pairs and a model whose heads are wide enough for the kernels of a GPU."""
    folder = tmp_path_factory.mktemp("defaults")
    for split, rows in arithmetic(32, 8, digits=1, seed=0).items():
        write(rows, folder / f"{split}.parquet")
    pairs = []
    for number in range(32):
        pairs.append({"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": str(number + 2)})
        pairs[-1]["response"] = pairs[-1]["chosen"]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=256, layers=2, max_model_len=512).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def run(verb: str, keys: list[str], folder: Path, device: str) -> dict[int, dict[str, float]]:
    """Train through the command line; the metrics of every step."""
    words = [*keys, f"trainer.default_local_dir={folder}", f"trainer.device={device}", "trainer.logger=file"]
    command([verb, *words], device)
    return metrics(folder)


def command(words: list[str], device: str) -> None:
    """On a GPU in a fresh interpreter: kernels are chosen once per process, and an earlier test must not do it."""
    if device == "cpu":
        assert dispatch(words) == 0
        return
    done = subprocess.run(
        [sys.executable, "-m", "strop.cli", *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def ppo_keys(inputs: Path, steps: int = 2) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={inputs}/model",
        f"data.train_files={inputs}/train.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"trainer.total_training_steps={steps}",
    ]


PPO = {
    "grpo": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"],
    "ppo with a critic and a reference": [
        "algorithm.use_kl_in_reward=true",
        "critic.ppo_mini_batch_size=8",
    ],
    "lora": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.model.lora_rank=8",
    ],
    "several mini-batches": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ],
    "fp16": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.fsdp_config.dtype=float16",
        "actor_rollout_ref.rollout.dtype=float16",
    ],
}


@pytest.mark.gpu
def test_long_answers(inputs: Path, tmp_path: Path) -> None:
    """A random model is never right at this length: the entropy bonus is the gradient."""
    keys = [
        *ppo_keys(inputs),
        *PPO["grpo"],
        "data.max_response_length=448",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    ]
    steps = run("ppo", keys, tmp_path, "cuda")
    for step in (1, 2):
        assert steps[step]["response_length/mean"] == 448
        assert 0 < steps[step]["actor/grad_norm"] < 1e4
        assert steps[step]["training/rollout_logprobs_diff_mean"] < 0.05


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PPO)
def test_ppo(name: str, device: str, inputs: Path, tmp_path: Path) -> None:
    steps = run("ppo", [*ppo_keys(inputs), *PPO[name]], tmp_path, device)
    assert sorted(step for step in steps if step > 0) == [1, 2]
    for step in (1, 2):
        assert 0 < steps[step]["actor/grad_norm"] < 1e4
        assert steps[step]["training/rollout_logprobs_diff_mean"] < 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_run_goes_on_with_validation(device: str, inputs: Path, tmp_path: Path) -> None:
    keys = [
        *ppo_keys(inputs),
        *PPO["grpo"],
        f"data.val_files={inputs}/test.parquet",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
    ]
    run("ppo", [*keys, "trainer.total_training_steps=1"], tmp_path, device)
    steps = run("ppo", keys, tmp_path, device)
    assert steps[2]["training/global_step"] == 2
    assert "val-core/arithmetic/acc/mean@1" in steps[2] or "val-core/arithmetic/reward/mean@1" in steps[2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("verb", ["sft", "rm", "dpo"])
def test_supervised(verb: str, validation: bool, device: str, inputs: Path, tmp_path: Path) -> None:
    keys = [
        f"model.path={inputs}/model",
        f"data.train_files={inputs}/pairs.jsonl",
        "data.train_batch_size=8",
        "trainer.total_epochs=1",
    ]
    if verb != "sft":
        keys.append("data.prompt_key=prompt")
    if validation:
        keys.append(f"data.val_files={inputs}/pairs.jsonl")
    steps = run(verb, keys, tmp_path, device)
    losses = [row["train/loss"] for step, row in sorted(steps.items()) if "train/loss" in row]
    assert len(losses) == 4 and all(0 < loss < 50 for loss in losses), losses


@pytest.mark.parametrize("device", DEVICES)
def test_generate_and_evaluate(
    device: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "answers.parquet"
    keys = [f"model.path={inputs}/model", f"data.path={inputs}/test.parquet", f"data.output_path={out}"]
    sizes = ["rollout.prompt_length=16", "rollout.response_length=8"]
    command(["generate", *keys, *sizes, f"trainer.device={device}"], device)
    assert parquet.read_table(out).num_rows == 8
    assert dispatch(["eval", f"data.path={out}"]) == 0
    assert "arithmetic" in capsys.readouterr().out
