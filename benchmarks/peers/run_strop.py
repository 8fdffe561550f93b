"""Strop's side of `compare.py`: `strop ppo` with the settings of examples/qwen_gsm8k.

python benchmarks/peers/run_strop.py --model FOLDER --out FOLDER --steps 10
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import task

HERE = Path(__file__).resolve().parent
START = "from strop.cli import main; main()"


def command(options: argparse.Namespace) -> list[str]:
    data = options.out.resolve() / "data"
    every = options.eval_every or -1
    keys = {
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "test.parquet",
        "data.train_batch_size": options.prompts,
        "data.max_prompt_length": options.prompt_tokens,
        "data.max_response_length": options.tokens,
        "data.shuffle": False,
        "actor_rollout_ref.model.path": options.model.resolve(),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": options.prompts,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 2 * options.tokens_per_pass,
        "actor_rollout_ref.actor.optim.lr": options.lr,
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
        "actor_rollout_ref.rollout.n": options.samples,
        "actor_rollout_ref.rollout.max_num_seqs": options.prompts * options.samples,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.rollout.temperature": 1.0,
        "algorithm.adv_estimator": "grpo",
        "custom_reward_function.path": HERE / "task.py",
        "custom_reward_function.name": "compute_score",
        "trainer.default_local_dir": options.out.resolve() / "run",
        "trainer.total_training_steps": options.steps,
        "trainer.test_freq": every,
        "trainer.val_before_train": bool(options.eval_every),
        "trainer.save_freq": -1,
        "trainer.seed": options.seed,
    }
    pairs = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()
    ]
    return [sys.executable, "-c", START, "ppo", *pairs, *options.extra]


def records(lines: list[dict[str, Any]], samples: int) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl` as records of the comparison."""
    for line in lines:
        found = line["data"]
        if "timing_s/step" in found:
            phases = {
                "rollout": found["timing_s/gen"],
                "log_probs": found.get("timing_s/old_log_prob", 0.0),
                "update": found["timing_s/update_actor"],
                "weight_sync": found.get("timing_s/update_weights", 0.0),
            }
            yield task.step_record(
                line["step"],
                found["timing_s/step"],
                phases,
                tokens=found["response_length/mean"] * samples,
                reward=found["critic/score/mean"],
                difference_mean=found.get("training/rollout_logprobs_diff_mean"),
                difference_max=found.get("training/rollout_logprobs_diff_max"),
            )
        accuracy = [value for key, value in found.items() if key.startswith("val-core/")]
        if accuracy:
            yield {"step": line["step"], "accuracy": accuracy[0]}


def main() -> None:
    options = task.arguments(__doc__).parse_args()
    full = command(options)
    if options.dry:
        print(" ".join(full))
        return
    log = options.out / "run" / "metrics.jsonl"
    task.end_on_sigterm()
    try:
        subprocess.run(full, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    finally:
        if log.exists():
            found = records(task.jsonl(log), options.prompts * options.samples)
            task.write_records(options.out, found, task.versions_of("strop", "torch", "transformers"))


if __name__ == "__main__":
    main()
