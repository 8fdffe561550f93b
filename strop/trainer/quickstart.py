"""`strop quickstart`: make a tiny model and a tiny task, then run the ordinary loop with the ordinary configuration.

Nothing here trains by reinforcement: that is `examples/quickstart.yaml`, given to the same loop as every other run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.config.compose import load
from strop.registry import did_you_mean

EXAMPLE = Path(__file__).with_name("quickstart.yaml").resolve()
"""That of the checkout, or the copy that an installed package brings."""

# What differs from GRPO.
ALGORITHMS: dict[str, list[str]] = {
    "grpo": [],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "critic.ppo_micro_batch_size_per_gpu=512",
        "critic.forward_micro_batch_size_per_gpu=512",
        "critic.model.enable_gradient_checkpointing=false",
        "critic.model.fsdp_config.dtype=float32",
    ],
    "rloo": ["algorithm.adv_estimator=rloo"],
    "reinforce_plus_plus": ["algorithm.adv_estimator=reinforce_plus_plus"],
    "remax": ["algorithm.adv_estimator=remax"],
}
WARM_START = 0.33
TRAINED, HELD_OUT = 2350, 150
"""Problems to learn and to be examined on, where there are as many."""
NEXT = """
What to try next:
  strop board runs                          look at it in a browser: curves, answers token by token
  strop quickstart --algorithm ppo          the same with a critic (also rloo, reinforce_plus_plus, remax)
  strop ppo {example} KEY=VALUE ...   change anything; strop config explain KEY explains it
  strop data gsm8k --out data --from FILES  then train a real model: strop check ppo ... and strop ppo ...
  custom_reward_function.path=my_reward.py  your own: def compute_score(data_source, solution_str, ground_truth, extra_info)
"""


def main(arguments: Sequence[str]) -> int:
    asked = _parse(arguments)
    started = time.time()
    out = Path(asked.out)
    say = sys.stdout.write
    overrides = [
        f"data.train_files={out}/data/train.parquet",
        f"data.val_files={out}/data/test.parquet",
        f"actor_rollout_ref.model.path={out}/model",
        f"trainer.default_local_dir={out}/run",
        f"trainer.validation_data_dir={out}/samples",
        f"trainer.seed={asked.seed}",
        *ALGORITHMS[asked.algorithm],
        *asked.overrides,
    ]
    load("ppo_trainer", overrides, str(EXAMPLE))  # a typo is told before the model learns by example
    prepare(out, largest=asked.largest, seed=asked.seed, say=say)
    train(overrides)
    summarise(out, say)
    say(f"{time.time() - started:.0f} s in all.\n{NEXT.format(example=os.path.relpath(EXAMPLE))}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="strop quickstart", description=__doc__)
    parser.add_argument("--algorithm", default="grpo", help=", ".join(ALGORITHMS))
    parser.add_argument("--out", default="runs/quickstart", help="folder for the model, the data and the run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=49, help="largest number to add")
    parser.add_argument("overrides", nargs="*", help="key=value, as for strop ppo")
    asked = parser.parse_args(list(arguments))
    if asked.algorithm not in ALGORITHMS:
        raise ValueError(
            f"--algorithm {asked.algorithm}: not one of {', '.join(ALGORITHMS)}.{did_you_mean(asked.algorithm, ALGORITHMS)}"
        )
    return asked


def prepare(out: Path, *, largest: int, seed: int, say: Any) -> None:
    """Data, and a model that is right about a third of the time: enough to be rewarded now and then."""
    from strop.data.make import arithmetic, write
    from strop.trainer.tiny import pairs_of, tiny_model, tiny_tokenizer, warm_start

    problems = (largest + 1) ** 2
    test_size = min(HELD_OUT, problems // 5)
    size = min(TRAINED, problems - test_size)
    for split, rows in arithmetic(size, test_size, largest=largest, padded=True, seed=seed).items():
        write(rows, out / "data" / f"{split}.parquet")
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=seed)
    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"A model of {count / 1e6:.1f} million parameters learns by example until it is right a third of the time ...\n")
    begun = time.time()
    train, test = pairs_of(out / "data" / "train.parquet"), pairs_of(out / "data" / "test.parquet")
    right = warm_start(model, tokenizer, train, test, until=WARM_START, seed=seed)
    say(f"... {right:.0%} right after {time.time() - begun:.0f} s. From here on it learns from rewards alone.\n")
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


def train(overrides: list[str]) -> None:
    from strop.trainer.build import build_ppo
    from strop.trainer.preflight import require

    loaded = load("ppo_trainer", overrides, str(EXAMPLE))
    require(loaded)
    build_ppo(loaded).fit()


def summarise(out: Path, say: Any) -> None:
    """Accuracy before and after, some answers side by side, and the curve."""
    from strop.run.chart import line_chart

    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    name = "val-core/arithmetic/acc/mean@1"
    held_out = [(row["step"], row["data"][name]) for row in rows if name in row["data"]]
    reward = [(row["step"], row["data"]["critic/score/mean"]) for row in rows if "critic/score/mean" in row["data"]]
    dumps = [out / "samples" / f"{step}.jsonl" for step, _ in (held_out[0], held_out[-1])]  # longer runs may have left others
    first, last = ([json.loads(line) for line in file.read_text().splitlines()] for file in dumps)
    say("\nquestion      expected  before    after\n")
    for before, after in list(zip(first, last))[:8]:
        say(f"{before['input']:<12}  {before['gts']:<8}  {before['output']:<8}  {after['output']}\n")
    chart = line_chart(out / "reward.png", {"training reward": reward, "held out greedy": held_out}, title="reward by step")
    say(f"\nHeld-out greedy accuracy: {held_out[0][1]:.1%} before, {held_out[-1][1]:.1%} after {held_out[-1][0]} steps.\n")
    say(f"Curve: {chart}   metrics: {out}/run/metrics.jsonl   samples: {out}/samples\n")
