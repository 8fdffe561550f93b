"""Make the recorded runs that the rules of health are calibrated on: real trainings of the quickstart's model.

    python -m tests.run.health_runs.make --list
    python -m tests.run.health_runs.make --work /tmp/runs NAME ...   (all without a name)

Each run is what its name says; a broken one differs from a healthy one by a single mistake that people make. Its metrics go to
NAME.jsonl.gz beside this file, to five digits.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = 50
KEPT = (
    "critic/",
    "actor/",
    "reward/",
    "response_length/",
    "training/rollout",
    "timing_s/",
    "perf/",
    "rollout/seconds",
    "staleness/",
    "val-core/",
)
REF = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.001"]


def _scorer(name: str) -> list[str]:
    return [f"custom_reward_function.path={HERE}/scorers.py", f"custom_reward_function.name={name}"]


def other_temperature(trainer: Any) -> None:
    """The trainer takes log-probs at another temperature than the engine samples at."""
    trainer.roles.actor.temperature = 0.6


def stale_engine(trainer: Any) -> None:
    """The engine samples from a copy of the weights that nobody updates."""
    from strop.shared.build import engine_for

    engine = engine_for(trainer.config.actor_rollout_ref.rollout, copy.deepcopy(trainer.roles.actor.module))
    trainer.collector.engine = engine
    trainer.collector.rollout.sampler.engine = engine


@dataclass(frozen=True)
class Recipe:
    overrides: tuple[str, ...] = ()
    algorithm: str = "grpo"
    seed: int = 1
    expected: str | None = None
    """The alert that names the mistake; None: healthy."""
    change: Callable[[Any], None] | None = None
    """What is broken in the trainer that was built."""


def _grpo(*overrides: str, seed: int = 1, expected: str | None = None, change: Any = None) -> Recipe:
    return Recipe(overrides, seed=seed, expected=expected, change=change)


ACTOR = "actor_rollout_ref.actor"
AHEAD = "trainer.async_training.enable=true"
RECIPES: dict[str, Recipe] = {
    "healthy_grpo": _grpo(),
    "healthy_grpo_seed_2": _grpo(seed=2),
    "healthy_grpo_seed_3": _grpo(seed=3),
    "healthy_grpo_kl": _grpo(*REF, f"{ACTOR}.kl_loss_coef=0.01", seed=4),
    "healthy_grpo_off_policy": _grpo(
        f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.optim.lr=2e-4", seed=5
    ),
    "healthy_grpo_two_parts": _grpo(*_scorer("two_parts"), seed=6),
    "healthy_ppo": Recipe(algorithm="ppo"),
    "healthy_ppo_kl_in_reward": Recipe(("algorithm.use_kl_in_reward=true",), "ppo", seed=2),
    "healthy_rloo": Recipe(algorithm="rloo"),
    "healthy_reinforce_plus_plus": Recipe(algorithm="reinforce_plus_plus"),
    "healthy_remax": Recipe(algorithm="remax"),
    "healthy_slow_lr": _grpo(f"{ACTOR}.optim.lr=1e-4", seed=7),
    "healthy_ahead": _grpo(AHEAD, seed=9),
    "healthy_ahead_of_two_updates": _grpo(
        AHEAD,
        "trainer.async_training.partial_rollout=true",
        "trainer.async_training.max_policy_age=2",
        seed=10,
    ),
    "broken_lr_too_high": _grpo(*REF, f"{ACTOR}.optim.lr=2e-2", seed=8, expected="kl_runaway"),
    "broken_hackable_reward": _grpo(*_scorer("hackable"), seed=2, expected="reward_hacking"),
    "broken_entropy_sign": _grpo(f"{ACTOR}.entropy_coeff=-2.0", seed=3, expected="entropy_collapse"),
    "broken_critic_lr_zero": Recipe(("critic.optim.lr=0.0",), "ppo", seed=3, expected="value_failure"),
    "broken_critic_lr_huge": Recipe(("critic.optim.lr=0.3",), "ppo", seed=4, expected="value_failure"),
    "broken_short_limit": _grpo("data.max_response_length=2", seed=4, expected="truncation"),
    "broken_constant_score": _grpo(*_scorer("constant"), seed=5, expected="zero_variance_groups"),
    "broken_temperature": _grpo(seed=6, expected="rollout_mismatch", change=other_temperature),
    "broken_stale_engine": _grpo(seed=7, expected="rollout_mismatch", change=stale_engine),
    "broken_outlier_scores": Recipe(tuple(_scorer("outlier")), "rloo", seed=2, expected="gradient_spike"),
    "broken_too_many_epochs": _grpo(
        f"{ACTOR}.ppo_mini_batch_size=16",
        f"{ACTOR}.ppo_epochs=4",
        f"{ACTOR}.optim.lr=2e-3",
        "trainer.total_training_steps=12",
        seed=3,
        expected="clip_fraction",
    ),
    "broken_length_reward": _grpo(
        *_scorer("longer"), "data.max_response_length=24", seed=2, expected="length_drift"
    ),
    "broken_leak": _grpo(*_scorer("leaking"), seed=3, expected="memory_growth"),
    "broken_slow_scorer": _grpo(
        *_scorer("sleeping"), "trainer.total_training_steps=15", seed=4, expected="idle_device"
    ),
}


def make(name: str, work: Path) -> None:
    from strop.config.compose import load
    from strop.ppo.build import build_ppo
    from strop.quickstart.quickstart import ALGORITHMS, EXAMPLE, prepare

    recipe = RECIPES[name]
    start = work / "start"
    if not (start / "model").exists():
        prepare(start, largest=49, seed=1, say=sys.stderr.write)
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    loaded = load(
        "ppo_trainer",
        [
            f"data.train_files={start}/data/train.parquet",
            f"data.val_files={start}/data/test.parquet",
            f"actor_rollout_ref.model.path={start}/model",
            f"trainer.default_local_dir={folder}",
            "trainer.validation_data_dir=null",
            f"trainer.seed={recipe.seed}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.test_freq=10",
            "trainer.save_freq=-1",
            "trainer.logger=file",
            *ALGORITHMS[recipe.algorithm],
            *recipe.overrides,
        ],
        str(EXAMPLE),
    )
    trainer = build_ppo(loaded)
    if recipe.change is not None:
        recipe.change(trainer)
    trainer.fit()
    store(folder / "metrics.jsonl", HERE / f"{name}.jsonl.gz")


def store(metrics: Path, target: Path) -> None:
    """The metrics that rules could look at, as small as they get."""
    lines = []
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        kept = {
            key: float(f"{value:.5g}") if isinstance(value, float) else value
            for key, value in row["data"].items()
            if key.startswith(KEPT)
        }
        lines.append(json.dumps({"step": row["step"], "data": kept}))
    with gzip.GzipFile(target, "wb", mtime=0) as file:  # the same run gives the same bytes
        file.write(("\n".join(lines) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--work", type=Path, default=Path("/tmp/health_runs"))
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(RECIPES))
        return
    for name in asked.names or RECIPES:
        make(name, asked.work)
        print(name, "is made")


if __name__ == "__main__":
    main()
