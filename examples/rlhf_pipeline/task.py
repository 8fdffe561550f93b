"""The files of the task: sums, answers to imitate, a model that knows nothing; and later, preferences between
its answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from judge import HESITANT, POLITE, compute_score

from strop.data.files import open_rows
from strop.data.make import Row, arithmetic, write
from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer

DEMONSTRATIONS, MOST_HESITATION, PAIRS = 8, 2, 8


def prepare(out: Path, *, size: int, test_size: int, largest: int, seed: int) -> None:
    """Sums to train on and to test with, demonstrations of the former, and an untrained model."""
    chance = random.Random(seed)
    splits = arithmetic(size, test_size, largest=largest, padded=True, seed=seed)
    for split, rows in splits.items():
        write([{**row, "data_source": "polite_sums"} for row in rows], out / "data" / f"{split}.parquet")
    shown = [
        {"prompt": row["prompt"], "response": demonstration(row["reward_model"]["ground_truth"], chance)}
        for row in splits["train"]
        for _ in range(DEMONSTRATIONS)
    ]
    write(shown, out / "data" / "demonstrations.parquet")
    tokenizer = tiny_tokenizer((POLITE, HESITANT))
    tiny_model(tokenizer, hidden=64, seed=seed).save_pretrained(out / "models" / "untrained")
    tokenizer.save_pretrained(out / "models" / "untrained")


def demonstration(number: str, chance: random.Random) -> str:
    """A right answer, polite or not, brief or not: nobody says yet which is better."""
    hesitation = HESITANT * chance.choice([0, chance.randint(1, MOST_HESITATION)])
    return hesitation + chance.choice(["", POLITE]) + number


def prefer(answers: Path, pairs: Path, *, seed: int) -> int:
    """What people would say of a model's answers, as pairs of a better and a worse one. Returns how many
    there are."""
    chance = random.Random(seed)
    rows = [pair for row in open_rows(str(answers)) for pair in _pairs(row, chance)]
    if not rows:
        raise ValueError(f"No two answers of {answers} differ in quality, so there is nothing to prefer.")
    write(rows, pairs)
    return len(rows)


def _pairs(row: Row, chance: random.Random) -> Iterator[Row]:
    """At most PAIRS pairs of answers to one prompt, none of two equally good ones."""
    truth = row["reward_model"]["ground_truth"]
    worth = {text: compute_score(text, truth)["score"] for text in sorted(set(row["responses"])) if text}
    ordered = (sorted(pair, key=worth.__getitem__) for pair in combinations(worth, 2))
    unequal = [(worse, better) for worse, better in ordered if worth[worse] < worth[better]]
    for worse, better in chance.sample(unequal, min(PAIRS, len(unequal))):
        yield {"prompt": row["prompt"], "chosen": better, "rejected": worse}
