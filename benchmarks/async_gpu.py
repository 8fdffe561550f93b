"""Sampling beside training on one GPU: the engine has a stream and a copy of the weights of its own.

    python benchmarks/async_gpu.py --hidden 1024 --layers 16 --steps 20

A model of random weights answers sums with up to `--tokens` tokens. It ends them by chance, so a few answers
are far longer than most. One JSON line per way of training: seconds per step, tokens per second, the age of
what was trained on, how far the engine's log-probs were from the trainer's, and the ratio to the synchronous
loop.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean

from strop.config.compose import load
from strop.data.make import arithmetic, write
from strop.ppo.build import build_ppo
from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer

ASYNC = "trainer.async_training."
SYSTEMS = {
    "synchronous": [],
    "partial between steps": [f"{ASYNC}partial_rollout=true"],
    "one step off": [f"{ASYNC}enable=true"],
    "beside, age 1": [f"{ASYNC}enable=true", f"{ASYNC}partial_rollout=true"],
    "beside, age 2": [f"{ASYNC}enable=true", f"{ASYNC}partial_rollout=true", f"{ASYNC}max_policy_age=2"],
}
WARM_UP_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    base = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for split, rows in arithmetic(512, 16, digits=2, seed=0).items():
            write(rows, Path(folder) / f"{split}.parquet")
        tokenizer = tiny_tokenizer(
            words=[f"w{i}" for i in range(110)]
        )  # about 1 in 128 tokens ends an answer
        model = tiny_model(
            tokenizer, hidden=asked.hidden, layers=asked.layers, max_model_len=asked.tokens + 32
        )
        for part in (model, tokenizer):
            part.save_pretrained(f"{folder}/model")
        for number, (system, settings) in enumerate(SYSTEMS.items()):
            out = Path(folder) / str(number)
            overrides = [
                f"data.train_files={folder}/train.parquet",
                f"data.train_batch_size={asked.prompts}",
                "data.max_prompt_length=16",
                f"data.max_response_length={asked.tokens}",
                f"actor_rollout_ref.model.path={folder}/model",
                "actor_rollout_ref.model.enable_gradient_checkpointing=false",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={asked.prompts}",
                "actor_rollout_ref.actor.use_dynamic_bsz=true",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
                "actor_rollout_ref.actor.optim.lr=1e-6",
                "actor_rollout_ref.rollout.n=8",
                "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
                "algorithm.adv_estimator=grpo",
                f"trainer.total_training_steps={asked.steps}",
                "trainer.logger=file",
                f"trainer.default_local_dir={out}",
                *settings,
            ]
            build_ppo(load("ppo_trainer", overrides)).fit()
            found = [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()][
                WARM_UP_STEPS:
            ]
            seconds = mean(step["timing_s/step"] for step in found)
            base = base or seconds
            line = {
                "system": system,
                "seconds_per_step": round(seconds, 3),
                "tokens_per_second": round(mean(step["perf/total_num_tokens"] for step in found) / seconds),
                "staleness_mean": round(mean(step.get("staleness/mean", 0.0) for step in found), 3),
                "log_prob_gap": float(
                    f"{mean(step['training/rollout_logprobs_diff_mean'] for step in found):.3g}"
                ),
                "ratio": round(base / seconds, 2),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
