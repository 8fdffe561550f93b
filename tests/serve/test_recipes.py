"""Unmodified recipes of tinker-cookbook against `strop serve-train`, offline.

A recipe finds tokenizer, renderer and data by names of the Hugging Face hub. In the working folder, folders of
these names hold a tiny model and a few rows, which transformers and datasets load instead.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.test_tinker import CLIENT, ServiceProcess, client_environment
from tests.serve.tiny import teach_arithmetic_format, write_tiny_model

pytestmark = [pytest.mark.tinker, pytest.mark.slow]

NAME = "Qwen/Qwen3-8B-Base"
Recipe = Callable[..., list[dict[str, Any]]]


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]], config: str = "default") -> None:
    """A data set of the hub as a folder."""
    place = folder / name
    place.mkdir(parents=True)
    for split in ("train", "test"):
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (place / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipe]:
    """Runs a module of the cookbook with settings; returns the metrics that it wrote, by step."""
    folder = tmp_path_factory.mktemp("recipes")
    model = write_tiny_model(folder / NAME)
    teach_arithmetic_format(model)
    questions = [{"question": f"What is {n} + 1?", "answer": f"It is.\n#### {n + 1}"} for n in range(8)]
    write_rows(folder, "openai/gsm8k", questions, "main")
    write_rows(folder, "zwhe99/DeepMath-103K", [{"question": f"What is {n} + 2?"} for n in range(8)])
    service = ServiceProcess(model, folder / "state", f"server.base_model={NAME}")
    count = 0

    def run(module: str, *settings: str) -> list[dict[str, Any]]:
        nonlocal count
        count += 1
        service.wait()
        logs = folder / f"logs{count}"
        command = [str(CLIENT), "-m", f"tinker_cookbook.recipes.{module}", f"base_url={service.url}"]
        done = subprocess.run(
            [*command, f"model_name={NAME}", f"log_path={logs}", *settings],
            cwd=folder,
            env=client_environment(TINKER_API_KEY="tml-any", HF_HOME=str(folder / "home")),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]

    try:
        yield run
    finally:
        service.kill()


def test_the_reward_of_the_arithmetic_recipe_rises(recipe: Recipe) -> None:
    metrics = recipe(
        "math_rl.train",
        "env=arithmetic",
        "lora_rank=8",
        "group_size=8",
        "groups_per_batch=16",
        "learning_rate=0.002",
        "max_tokens=12",
        "max_steps=8",
        "eval_every=0",
        "save_every=0",
    )
    rewards = [step["env/all/reward/total"] for step in metrics if "env/all/reward/total" in step]
    formats = [step["env/all/format"] for step in metrics if "env/all/format" in step]
    assert len(rewards) == 8
    # The tiny model cannot add, but it learns to end its answers, which costs 0.1 each time it does not.
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.03, rewards
    assert formats[0] < 0.6 and sum(formats[-3:]) / 3 > 0.8, formats
    # What was sampled and what is trained have the same log-probs.
    assert max(abs(step.get("optim/kl_sample_train_v1", 0.0)) for step in metrics) < 1e-3


def test_supervised_training_lowers_the_loss(recipe: Recipe, tmp_path: Path) -> None:
    rows = tmp_path / "conversations.jsonl"
    with rows.open("w") as file:
        for number in range(16):
            turns = [("user", f"say {number}"), ("assistant", "yes yes")]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    metrics = recipe(
        "chat_sl.train",
        f"dataset={rows}",
        "renderer_name=role_colon",
        "lora_rank=8",
        "batch_size=8",
        "max_length=64",
        "learning_rate=0.01",
        "num_epochs=6",
        "eval_every=0",
        "save_every=0",
    )
    losses = [step["train_mean_nll"] for step in metrics if "train_mean_nll" in step]
    assert len(losses) >= 6 and losses[-1] < 0.8 * losses[0], losses


def test_the_loop_on_gsm8k_runs(recipe: Recipe) -> None:
    metrics = recipe(
        "rl_loop",
        "batch_size=4",
        "group_size=4",
        "lora_rank=4",
        "max_tokens=8",
        "max_steps=2",
        "save_every=1",
    )
    assert [step["progress/batch"] for step in metrics if "reward/total" in step] == [0, 1]


def test_on_policy_distillation_runs(recipe: Recipe) -> None:
    metrics = recipe(
        "distillation.on_policy_distillation",
        f"teacher_model={NAME}",
        "dataset=deepmath",
        "groups_per_batch=4",
        "group_size=2",
        "lora_rank=4",
        "max_tokens=8",
        "max_steps=2",
        "eval_every=0",
        "save_every=0",
    )
    # The teacher is the base model, and the student begins as it.
    distances = [step["teacher_kl"] for step in metrics if "teacher_kl" in step]
    assert len(distances) == 2 and abs(distances[0]) < 1e-3, metrics
