"""Supervised runs in this process: a tiny task on the disk, settings for it, and what a run leaves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from strop.config.compose import load
from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer
from strop.run.checkpoint.store import load as load_checkpoint
from strop.supervised.build import build_supervised_trainer
from strop.supervised.trainer import SupervisedTrainer
from tests.ppo.runs import metrics

VERBS = ("sft", "rm", "dpo")


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows that serve all three: a question, its answer, and a wrong answer of another length now and then."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = chance.randint(0, 9), chance.randint(0, 9)
        wrong = a + b + chance.choice([1, 2, 95])
        rows.append(
            {"prompt": f"{a}+{b}=", "response": str(a + b), "chosen": str(a + b), "rejected": str(wrong)}
        )
    return rows


def make_task(folder: Path) -> Path:
    lines(folder / "train.jsonl", sums(64, seed=0))
    lines(folder / "val.jsonl", sums(19, seed=1))
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=32, layers=2).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def settings(task: Path, run: Path, verb: str) -> list[str]:
    """Eight steps in two epochs."""
    return [
        f"model.path={task}/model",
        "model.enable_gradient_checkpointing=false",
        "model.fsdp_config.dtype=float32",
        f"data.train_files={task}/train.jsonl",
        f"data.val_files={task}/val.jsonl",
        "data.train_batch_size=16",
        "data.micro_batch_size_per_gpu=16",
        *(["data.prompt_key=prompt"] if verb != "sft" else []),
        "optim.lr=1e-3",
        "trainer.total_epochs=2",
        f"trainer.default_local_dir={run}",
        "trainer.logger=file",
    ]


def build(verb: str, overrides: list[str], *more: str) -> SupervisedTrainer:
    return build_supervised_trainer(load(f"{verb}_trainer", [*overrides, *more]))


def train(verb: str, overrides: list[str], *more: str) -> dict[int, dict[str, float]]:
    """Train; the metrics of every step."""
    trainer = build(verb, overrides, *more)
    trainer.fit()
    return metrics(Path(trainer.config.trainer.default_local_dir))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / f"global_step_{step}")["model/model"]
