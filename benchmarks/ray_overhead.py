"""What Ray costs: the same run of two ranks, started by this machine and by a Ray cluster, in turns.

    python benchmarks/ray_overhead.py [--steps 8] [--rounds 3] [--hidden 256]

Prints one JSON line per runtime (median seconds of a step and of the whole command), then the ratio. Ranks are the same plain
processes either way and speak to each other by gloo, so what is left for Ray is the start, and a watcher that looks twice a
second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def make_task(folder: Path, hidden: int) -> list[str]:
    from strop.data.make import arithmetic, write
    from strop.trainer.tiny import tiny_model, tiny_tokenizer

    for split, rows in arithmetic(512, 16, digits=2, seed=0).items():
        write(rows, folder / "data" / f"{split}.parquet")
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=hidden, layers=4).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return [
        f"data.train_files={folder}/data/train.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.rollout.n=8",
        "data.train_batch_size=32",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=file",
    ]


def measure(settings: list[str], runtime: str, steps: int, folder: Path) -> dict[str, float]:
    start = time.perf_counter()
    more = [f"trainer.runtime={runtime}", f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}"]
    subprocess.run(
        [sys.executable, "-m", "strop.cli", "ppo", *settings, *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    whole = time.perf_counter() - start
    rows = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row][2:]  # the first ones warm up
    return {"step_s": statistics.median(seconds), "command_s": whole}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = make_task(folder, asked.hidden)
        found: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
        for turn in range(asked.rounds):
            for runtime in found:
                found[runtime].append(measure(settings, runtime, asked.steps, folder / f"{runtime}{turn}"))
        best = {r: {k: round(statistics.median(one[k] for one in runs), 4) for k in runs[0]} for r, runs in found.items()}
        for runtime, numbers in best.items():
            print(json.dumps({"benchmark": "ray_overhead", "runtime": runtime, "rounds": asked.rounds, **numbers}))
        pairs = [b["step_s"] / a["step_s"] for a, b in zip(found["local"], found["ray"], strict=True)]
        print(json.dumps({"benchmark": "ray_overhead", "step_ratio": round(statistics.median(pairs), 4),
                          "ratios": [round(pair, 4) for pair in pairs],
                          "extra_start_s": round(best["ray"]["command_s"] - best["local"]["command_s"], 2)}))  # fmt: skip


if __name__ == "__main__":
    main()
