"""The whole of RLHF in minutes on a laptop: `python examples/rlhf_pipeline/run.py [--out DIR]`.

Imitate (sft), learn what people prefer (rm), optimise it (ppo), answer new questions (generate), judge the
answers (eval); and dpo from the same preferences. Every stage is a `strop` command that you could type in the
folder --out. The script ends with a table, and with exit code 1 if a stage is not better than the one before.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import stages
from judge import compute_score
from stages import Check
from task import prefer, prepare

from strop.data.files import open_rows

HERE = Path(__file__).resolve().parent
MODELS = ("untrained", "sft", "dpo", "ppo")
ENOUGH_ACCURACY = 0.7
"""Of the reward model, on pairs it has not seen; chance is 0.5."""


def pipeline(seed: int) -> list[Check]:
    stages.train("sft", HERE)
    for model in ("untrained", "sft"):
        stages.answer(model, HERE)
    stages.answer("sft", HERE, "train")
    for split, name in (("train", "pairs"), ("test", "held_out_pairs")):
        count = prefer(Path(f"answers/sft_{split}.parquet"), Path(f"data/{name}.parquet"), seed=seed)
        print(f"  {count} preferences between answers of sft: data/{name}.parquet", flush=True)
    for verb in ("rm", "ppo", "dpo"):
        stages.train(verb, HERE)
    for model in ("ppo", "dpo"):
        stages.answer(model, HERE)
    return [better("untrained", "sft"), knows_preferences(), better("sft", "ppo"), better("sft", "dpo")]


def better(before: str, after: str) -> Check:
    """Whether perfect answers became more frequent: 0 is outside of the interval of the difference."""
    found = stages.compare(before, after, f"custom_reward_function.path={HERE / 'judge.py'}")
    means = (found[name]["mean"] for name in ("before", "after"))
    return Check(
        after, f"perfect answers, {before} -> {after}", *means, passed=found["difference"]["low"] > 0
    )


def knows_preferences() -> Check:
    first, *_, last = stages.measured("rm", "val/accuracy")
    return Check(
        "rm", "held-out pairs in the right order", first, last, passed=last > max(first, ENOUGH_ACCURACY)
    )


def show_models() -> None:
    """What the judge says of every model, and some answers."""
    print(f"\n{'model':<12}{'score':>6}{'right':>8}{'polite':>8}{'brief':>8}{'perfect':>9}   some answers")
    for model in MODELS:
        rows = list(open_rows(f"answers/{model}_test.parquet"))
        found = [
            compute_score(text, row["reward_model"]["ground_truth"])
            for row in rows
            for text in row["responses"]
        ]
        means = {name: sum(marks[name] for marks in found) / len(found) for name in found[0]}
        some = "   ".join(f"{row['prompt'][0]['content']}{row['responses'][0]}" for row in rows[:3])
        shares = "".join(f"{means[name]:>8.1%}" for name in ("right", "polite", "brief"))
        print(f"{model:<12}{means['score']:>6.3f}{shares}{means['acc']:>9.1%}   {some}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/rlhf_pipeline"), help="folder to work in; an earlier run goes"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the data and of the untrained model")
    parser.add_argument("--largest", type=int, default=29, help="largest number to add")
    parser.add_argument("--size", type=int, default=750, help="sums to train on")
    parser.add_argument("--test-size", type=int, default=150, help="sums to test with")
    asked = parser.parse_args(arguments)
    begun = time.time()
    stages.enter(asked.out)
    prepare(Path(), size=asked.size, test_size=asked.test_size, largest=asked.largest, seed=asked.seed)
    checks = pipeline(asked.seed)
    show_models()
    return stages.conclude(checks, begun)


if __name__ == "__main__":
    sys.exit(main())
