"""Does sampling ahead of training pay, and does the model learn as well?

    python benchmarks/async_training.py --seeds 3

A tiny untrained model learns by GRPO to say "7", one of its 17 tokens. Tokens cost time (timed_engine.py):
the median sample of a step is quick, the slowest takes about ten times as long, and the synchronous loop
waits for it in every step. Every system trains as many steps on the same rows from the same model. One JSON
line per system and seed, with steps per second after the first ones and the share of sevens in the first and
last steps; the ratios to the synchronous loop come last.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from statistics import mean

from strop.config.compose import load
from strop.data.make import arithmetic, write
from strop.ppo.build import build_ppo
from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer

ASYNC = "trainer.async_training."
SYSTEMS = {
    "synchronous": [],
    "partial between steps, age 1": [f"{ASYNC}partial_rollout=true"],
    "one step off": [f"{ASYNC}enable=true"],
    "beside, age 1": [f"{ASYNC}enable=true", f"{ASYNC}partial_rollout=true"],
    "beside, age 2": [f"{ASYNC}enable=true", f"{ASYNC}partial_rollout=true", f"{ASYNC}max_policy_age=2"],
}
SEVENS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count("7") / 4
"""
WARM_UP_STEPS = 2


def prepare(task: Path, seed: int) -> None:
    for split, rows in arithmetic(64, 16, digits=1, seed=seed).items():
        write(rows, task / f"{split}.parquet")
    (task / "sevens.py").write_text(SEVENS)
    tokenizer = tiny_tokenizer()
    for part in (tiny_model(tokenizer, hidden=32, seed=seed), tokenizer):
        part.save_pretrained(task / "model")


def train(
    task: Path, out: Path, settings: list[str], asked: argparse.Namespace, seed: int
) -> dict[int, dict[str, float]]:
    overrides = [
        f"data.train_files={task}/train.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={task}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.name=timed",
        f"actor_rollout_ref.rollout.engine_kwargs.timed.seconds={asked.seconds}",
        f"actor_rollout_ref.rollout.engine_kwargs.timed.spread={asked.spread}",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={task}/sevens.py",
        f"plugins=[{Path(__file__).parent / 'timed_engine.py'}]",
        f"trainer.total_training_steps={asked.steps}",
        "trainer.logger=file",
        f"trainer.default_local_dir={out}",
        f"trainer.seed={seed}",
        *settings,
    ]
    build_ppo(load("ppo_trainer", overrides)).fit()
    found: dict[int, dict[str, float]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], {}).update(row["data"])
    return found


def summary(system: str, seed: int, steps: dict[int, dict[str, float]]) -> dict[str, object]:
    last = max(steps)
    seconds = [steps[s]["timing_s/step"] for s in steps if s > WARM_UP_STEPS]
    return {
        "system": system,
        "seed": seed,
        "steps_per_second": round(1 / mean(seconds), 3),
        "score_first_3": round(mean(steps[s]["critic/score/mean"] for s in range(1, 4)), 3),
        "score_last_5": round(mean(steps[s]["critic/score/mean"] for s in range(last - 4, last + 1)), 3),
        "staleness_mean": round(mean(steps[s].get("staleness/mean", 0.0) for s in range(1, last + 1)), 3),
        "staleness_max": max(steps[s].get("staleness/max", 0.0) for s in range(1, last + 1)),
        "waiting_for_samples": round(
            mean(steps[s]["timing_s/gen"] / steps[s]["timing_s/step"] for s in range(1, last + 1)), 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.012, help="of a median token")
    parser.add_argument(
        "--spread", type=float, default=0.9, help="sigma of the logarithm of a sample's slowness"
    )
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS).replace(", ", ";"), help="comma list; ; stands for a comma"
    )
    asked = parser.parse_args()
    chosen = [name.replace(";", ", ") for name in asked.systems.split(",")]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, asked.seeds + 1):
            task = Path(folder) / f"task_{seed}"
            prepare(task, seed)
            for system in chosen:
                with redirect_stderr(io.StringIO()):
                    steps = train(
                        task, Path(folder) / f"{seed}_{chosen.index(system)}", SYSTEMS[system], asked, seed
                    )
                lines.append(summary(system, seed, steps))
                print(json.dumps(lines[-1]), flush=True)
    base = [line for line in lines if line["system"] == chosen[0]]
    for system in chosen[1:]:
        mine = [line for line in lines if line["system"] == system]
        faster = [float(a["steps_per_second"]) / float(b["steps_per_second"]) for a, b in zip(mine, base)]  # type: ignore[arg-type]
        better = [float(a["score_last_5"]) - float(b["score_last_5"]) for a, b in zip(mine, base)]  # type: ignore[arg-type]
        print(
            json.dumps(
                {
                    "system": system,
                    "against": chosen[0],
                    "throughput_ratio": round(mean(faster), 2),
                    "lowest_ratio": round(min(faster), 2),
                    "score_difference": round(mean(better), 3),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
