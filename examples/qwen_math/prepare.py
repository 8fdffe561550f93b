"""Generated problems in the style of competition mathematics: `python examples/qwen_math/prepare.py`.

Writes train.parquet, and two files of problems that are not trained on: test_instances.parquet (other numbers
in the same families) and test_families.parquet (families that have no problem in train.parquet).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import algebra  # noqa: F401 - registers its families, as the next two do
import geometry  # noqa: F401
import integers  # noqa: F401
from problem import FAMILIES

from strop.data.make import MATH_INSTRUCTION, write


def rows_of(
    names: Sequence[str], count: int, source: str, seed: int, seen: set[str]
) -> Iterator[dict[str, Any]]:
    """`count` rows with texts that are not in `seen`, the families in turn."""
    draw = random.Random(seed)
    made = 0
    for attempt in range(200 * count):
        if made == count:
            return
        name = names[attempt % len(names)]
        subject, _, family = FAMILIES[name]
        problem = family(draw)
        if problem.text in seen:
            continue
        seen.add(problem.text)
        yield {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{problem.text} {MATH_INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": made, "family": name, "subject": subject},
        }
        made += 1
    raise ValueError(
        f"Only {made} different problems of {count} could be drawn for {source!r} from {len(names)} "
        "families. Ask for fewer."
    )


def problems(train: int, test: int, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The rows of the three files; no text is in two of them."""
    trained = [name for name, (_, held_out, _) in FAMILIES.items() if not held_out]
    held_out = [name for name, (_, held_out, _) in FAMILIES.items() if held_out]
    seen: set[str] = set()
    # Test rows first: what they take cannot be trained on.
    return {
        "test_instances": list(rows_of(trained, test, "generated_math/instances", seed + 1, seen)),
        "test_families": list(rows_of(held_out, test, "generated_math/families", seed + 2, seen)),
        "train": list(rows_of(trained, train, "generated_math/train", seed, seen)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/qwen_math/data"))
    parser.add_argument("--train", type=int, default=6000, help="problems to train on")
    parser.add_argument("--test", type=int, default=500, help="problems in each of the two test files")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    for name, rows in problems(asked.train, asked.test, asked.seed).items():
        write(rows, asked.out / f"{name}.parquet")
        print(
            f"{name}: {len(rows)} problems of {len({row['extra_info']['family'] for row in rows})} families"
        )


if __name__ == "__main__":
    main()
