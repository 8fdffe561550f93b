"""`strop quickstart`: make a tiny model and a tiny task, then run the ordinary loop with the ordinary
configuration.

Nothing here trains by reinforcement: that is `examples/quickstart.yaml`, given to the same loop as every
other run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from strop.config.compose import load
from strop.config.schema.trainer import TrainerConfig
from strop.registry import did_you_mean

EXAMPLE = Path(__file__).with_name("quickstart.yaml").resolve()
"""The file of the checkout, or its copy in an installed package."""
Writer: TypeAlias = Callable[[str], object]
"""Prints a text."""

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
"""Accuracy at which supervised training ends and reinforcement learning begins."""
TRAINED = 2350
"""Problems to train on, if there are as many."""
HELD_OUT = 150
"""Problems to validate on, if there are as many."""
SMALLEST_TASK = 2
"""The least `--largest` with a problem to validate on."""
NEXT = """
What to try next:{activate}
  strop board runs                          look at it in a browser: curves, answers token by token
  strop quickstart --algorithm ppo          the same with a critic (also rloo, reinforce_plus_plus, remax)
  strop ppo {example} KEY=VALUE ...   change anything; strop config explain KEY explains it
  strop data gsm8k --out data --from FILES  then train a real model: strop check ppo ... and strop ppo ...
  custom_reward_function.path=my_reward.py  your own: def compute_score(data_source, solution_str, \
ground_truth, extra_info)
"""


def main(arguments: Sequence[str]) -> int:
    """Make the task and the model, train, and print the results; returns the exit code."""
    options = _parse(arguments)
    started = time.time()
    out = Path(options.out or default_folder(options.algorithm))
    say = sys.stdout.write
    overrides = [
        f"data.train_files={out}/data/train.parquet",
        f"data.val_files={out}/data/test.parquet",
        f"actor_rollout_ref.model.path={out}/model",
        f"trainer.default_local_dir={out}/run",
        f"trainer.validation_data_dir={out}/samples",
        f"trainer.seed={options.seed}",
        *ALGORITHMS[options.algorithm],
        *options.overrides,
    ]
    config = load(
        "ppo_trainer", overrides, str(EXAMPLE)
    ).config  # reports a typo before the supervised training
    prepare(out, largest=options.largest, seed=options.seed, say=say)
    train(overrides)
    summarise(out, config.trainer, say)
    following = NEXT.format(example=os.path.relpath(EXAMPLE), activate=_activation())
    say(f"{time.time() - started:.0f} s in all.\n{following}")
    return 0


def _activation() -> str:
    """The line that puts `strop` on the path, where `make` ran it from an inactive environment."""
    if shutil.which("strop") is not None or sys.prefix == sys.base_prefix:
        return ""
    command = f"source {os.path.relpath(sys.prefix)}/bin/activate"
    return f"\n  {command:<42}first: it puts strop on the path"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="strop quickstart",
        description="Make a tiny model, teach it to write sums by SFT, then train it by reinforcement "
        "learning with the loop and configuration of every other run (examples/quickstart.yaml). Needs no "
        "GPU and no download.",
    )
    parser.add_argument("--algorithm", default="grpo", help=", ".join(ALGORITHMS))
    parser.add_argument(
        "--out",
        help="folder for the model, the data and the run (default: runs/quickstart, or "
        "runs/quickstart_ALGORITHM for another algorithm than grpo)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=49, help="largest number to add")
    parser.add_argument("overrides", nargs="*", help="key=value, as for strop ppo")
    options = parser.parse_args(list(arguments))
    if options.algorithm not in ALGORITHMS:
        raise ValueError(
            f"--algorithm {options.algorithm}: not one of "
            f"{', '.join(ALGORITHMS)}.{did_you_mean(options.algorithm, ALGORITHMS)}"
        )
    if options.largest < SMALLEST_TASK:
        raise ValueError(
            f"--largest {options.largest}: too few problems to train on and to hold out. Use {SMALLEST_TASK} "
            "or more."
        )
    return options


def default_folder(algorithm: str) -> str:
    """A folder per algorithm: a second run must not hide the metrics of the first, or mix the checkpoints.

    >>> default_folder("grpo"), default_folder("ppo")
    ('runs/quickstart', 'runs/quickstart_ppo')
    """
    if algorithm == "grpo":
        return "runs/quickstart"
    return f"runs/quickstart_{algorithm}"


def prepare(out: Path, *, largest: int, seed: int, say: Writer) -> None:
    """Write the data, and a model with an accuracy of about a third: enough to get some rewards."""
    from strop.data.make import arithmetic, write
    from strop.quickstart.tiny_model import pairs_of, tiny_model, tiny_tokenizer, warm_start

    problems = (largest + 1) ** 2
    test_size = min(HELD_OUT, problems // 5)
    size = min(TRAINED, problems - test_size)
    for split, rows in arithmetic(size, test_size, largest=largest, padded=True, seed=seed).items():
        write(rows, out / "data" / f"{split}.parquet")
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=seed)
    count = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"A model of {count / 1e6:.1f} million parameters learns by example until it is right a third of the "
        "time ...\n"
    )
    begun = time.time()
    train = pairs_of(out / "data" / "train.parquet")
    test = pairs_of(out / "data" / "test.parquet")
    right = warm_start(model, tokenizer, train, test, until=WARM_START, seed=seed)
    say(
        f"... {right:.0%} right after {time.time() - begun:.0f} s. From here on it learns from rewards "
        "alone.\n"
    )
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


def train(overrides: list[str]) -> None:
    """Run PPO as `strop ppo` does."""
    from strop.ppo.build import build_ppo
    from strop.preflight.examine import require

    loaded = load("ppo_trainer", overrides, str(EXAMPLE))
    require(loaded)
    build_ppo(loaded).fit()


def summarise(out: Path, trainer: TrainerConfig, say: Writer) -> None:
    """Print the accuracy before and after training and some answers, and draw the reward curve. Without the
    file of metrics or the first validation, which keys can switch off, there is nothing to compare."""
    file = Path(trainer.default_local_dir) / "metrics.jsonl"
    metrics = _read_jsonl(file) if file.exists() else []
    held_out = _metric_by_step(metrics, "val-core/arithmetic/acc/mean@1")
    reward = _metric_by_step(metrics, "critic/score/mean")
    if not held_out or held_out[0][0] > 0 or not trainer.validation_data_dir:
        say(
            f"\nThe run is in {trainer.default_local_dir}; it has no validation before training to compare.\n"
        )
        return
    samples = Path(trainer.validation_data_dir)
    # Earlier runs with more steps may have left other files in the folder.
    first = _read_jsonl(samples / f"{held_out[0][0]}.jsonl")
    last = _read_jsonl(samples / f"{held_out[-1][0]}.jsonl")
    say("\nquestion      expected  before    after\n")
    for before, after in list(zip(first, last))[:8]:
        say(f"{before['input']:<12}  {before['gts']:<8}  {before['output']:<8}  {after['output']}\n")
    say(
        f"\nHeld-out greedy accuracy: {held_out[0][1]:.1%} before, {held_out[-1][1]:.1%} after "
        f"{held_out[-1][0]} steps.\n"
    )
    curve = draw_curve(out / "reward.png", {"training reward": reward, "held out greedy": held_out})
    say(f"Curve: {curve}   metrics: {file}   samples: {samples}\n")


def _read_jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _metric_by_step(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of each row that has the metric."""
    points: list[tuple[int, float]] = []
    for row in rows:
        if name in row["data"]:
            points.append((row["step"], row["data"][name]))
    return points


def draw_curve(file: Path, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw the reward curve; returns the path of the picture, or how to install what draws it."""
    from strop.extras import MissingExtra, install_command
    from strop.run.chart import line_chart

    try:
        return str(line_chart(file, curves, title="reward by step"))
    except MissingExtra:
        return f"not drawn, matplotlib is missing ({install_command('plot')})"
