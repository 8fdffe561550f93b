"""A short warm-up on worked solutions: `python sft.py --model PATH --out FOLDER`.

At temperature 1 the plain model almost never writes `#### 42`, so a strict reward would have nothing to say.
A pass or two over the training split's solutions teaches the form. This is `strop sft` with sft.yaml, and
after it the accuracy of every epoch.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluate import accuracy

from strop.config.compose import load
from strop.config.schema.model import ModelConfig
from strop.data.files import open_rows
from strop.models.build import build_policy, build_tokenizer, compute_dtype
from strop.preflight.examine import require
from strop.shared.build import device_of
from strop.supervised.build import build_supervised_trainer

CONFIG = Path(__file__).parent / "sft.yaml"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", default="runs/gsm8k_smollm2/data/train.parquet")
    parser.add_argument("--test", help="greedy accuracy on this file after every epoch")
    parser.add_argument("--out", default="runs/gsm8k_smollm2/sft")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64, help="solutions per update")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--max-rows", type=int, default=-1, help="of the training file and of the test file")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    return parser.parse_args(arguments)


def train(asked: argparse.Namespace, run: Path) -> list[dict[str, Any]]:
    """The metrics of every step."""
    overrides = [
        f"model.path={asked.model}",
        f"data.train_files={asked.data}",
        f"data.train_batch_size={asked.rows}",
        f"data.train_max_samples={asked.max_rows}",
        f"optim.lr={asked.lr}",
        f"trainer.total_epochs={asked.epochs}",
        f"trainer.seed={asked.seed}",
        f"trainer.device={asked.device}",
        f"trainer.default_local_dir={run}",
    ]
    loaded = load("sft_trainer", overrides, str(CONFIG))
    build_supervised_trainer(loaded, require(loaded).datasets).fit()
    return [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def tested(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    settings, device = ModelConfig(path=str(folder)), device_of(asked.device)
    model = build_policy(settings).to(device, compute_dtype("bfloat16", device))
    rows = list(open_rows(asked.test))[: asked.max_rows if asked.max_rows > 0 else None]
    return accuracy(model, build_tokenizer(settings), rows, max_tokens=asked.max_tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = parse(arguments)
    out = Path(asked.out)
    run = out / "run"
    steps = train(asked, run)
    updates = len(steps) // asked.epochs
    with (out / "metrics.jsonl").open("w") as log:
        for epoch in range(1, asked.epochs + 1):
            folder = run / f"global_step_{epoch * updates}" / "model" / "huggingface"
            mine = steps[(epoch - 1) * updates : epoch * updates]
            mean, spent = (sum(step[name] for step in mine) for name in ("train/loss", "timing_s/step"))
            found = tested(folder, asked) if asked.test else {}
            values = {
                "epoch": epoch,
                "updates": updates,
                "loss": mean / updates,
                "seconds": spent,
                "test": found,
            }
            print(json.dumps(values), file=log, flush=True)
            right = found.get("strict", float("nan"))
            print(f"epoch {epoch}: loss {values['loss']:.3f}, {spent:.0f} s, strict accuracy {right:.2%}")
    shutil.copytree(folder, out, dirs_exist_ok=True)
    print(f"saved to {out}")


if __name__ == "__main__":
    main()
