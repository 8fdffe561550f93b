"""Programming tasks with hidden tests: `python examples/qwen_code/prepare.py`.

Writes train.parquet, and two files of tasks that are not trained on: test_instances.parquet (other instances
of the same families) and test_families.parquet (families that have no task in train.parquet). The prompt
shows one call with its value; the tests are other calls, which only the reward knows.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import arithmetic  # noqa: F401 - registers its families, as the next three do
import dictionaries  # noqa: F401
import lists  # noqa: F401
import strings  # noqa: F401
from task import FAMILIES, Task, build

from strop.data.make import write

TESTS = 10
DRAWS_PER_TEST = 20
PROMPT = (
    "Write a Python function `{signature}` that {text}\n\n"
    "For example, `{call}` returns `{value!r}`.\n\n"
    "Answer with one Python code block that defines the function, and nothing else."
)


def calls_of(task: Task, draw: random.Random, count: int) -> list[tuple[list[object], object]] | None:
    """Different calls with their values; None if the values are nearly always the same."""
    found: dict[str, tuple[list[object], object]] = {}
    for _ in range(count * DRAWS_PER_TEST):
        arguments = task.arguments(draw)
        found.setdefault(json.dumps(arguments), (arguments, task.call(arguments)))
        if len(found) == count:
            break
    values = [json.dumps(value) for _, value in found.values()]
    commonest = max(values.count(value) for value in values)
    if len(found) < count or commonest > count // 2:
        return None
    return list(found.values())


def to_row(task: Task, draw: random.Random, source: str, index: int) -> dict[str, Any] | None:
    """A row for training; None if these parameters make a task that a constant would nearly solve."""
    calls = calls_of(task, draw, TESTS + 1)
    if calls is None:
        return None
    # The longest one: a call with an empty list or with the value 0 says little about the task.
    shown = max(calls, key=lambda pair: len(json.dumps(pair)))
    tests = [pair for pair in calls if pair is not shown]
    arguments, value = shown
    call = f"{task.function}({', '.join(map(repr, arguments))})"
    truth = {
        "fn_name": task.function,
        "inputs": [given for given, _ in tests],
        "outputs": [expected for _, expected in tests],
        "shown": [arguments, value],
    }
    prompt = PROMPT.format(signature=task.signature, text=task.text, call=call, value=value)
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {"index": index, "family": task.family, "topic": task.topic},
    }


def rows_of(
    names: Sequence[str], count: int, source: str, seed: int, is_new: Callable[[str], bool]
) -> Iterator[dict[str, Any]]:
    """`count` rows, the families in turn."""
    draw = random.Random(seed)
    made = 0
    for attempt in range(200 * count):
        if made == count:
            return
        task = build(names[attempt % len(names)], draw)
        if not is_new(f"{task.signature} {task.text}"):
            continue
        row = to_row(task, draw, source, made)
        if row is not None:
            made += 1
            yield row
    raise ValueError(
        f"Only {made} different tasks of {count} could be drawn for {source!r} from {len(names)} families. "
        "Ask for fewer."
    )


def tasks(train: int, test: int, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The rows of the three files. A task has one text, and no text is in two of them."""
    trained = [name for name, (_, held_out, _) in FAMILIES.items() if not held_out]
    held_out = [name for name, (_, held_out, _) in FAMILIES.items() if held_out]
    seen: set[str] = set()

    def is_new(text: str) -> bool:
        new = text not in seen
        seen.add(text)
        return new

    # Test rows first: what they take cannot be trained on.
    return {
        "test_instances": list(rows_of(trained, test, "generated_code/instances", seed + 1, is_new)),
        "test_families": list(rows_of(held_out, test, "generated_code/families", seed + 2, is_new)),
        "train": list(rows_of(trained, train, "generated_code/train", seed, is_new)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/qwen_code/data"))
    parser.add_argument("--train", type=int, default=1200, help="tasks to train on")
    parser.add_argument("--test", type=int, default=100, help="tasks in each of the two test files")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    for name, rows in tasks(asked.train, asked.test, asked.seed).items():
        write(rows, asked.out / f"{name}.parquet")
        print(f"{name}: {len(rows)} tasks of {len({row['extra_info']['family'] for row in rows})} families")


if __name__ == "__main__":
    main()
