"""A tiny model that guesses anything, whatever it was told; and games for it."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from strop.data.make import write
from strop.quickstart.tiny_model import Pair, teach, tiny_model, tiny_tokenizer

WORDS = ("higher", "lower", "?")


def random_games(count: int, numbers: int, guesses: int, seed: int) -> list[Pair]:
    """Conversations so far, and a guess that has nothing to do with them."""
    chance = random.Random(seed)
    pairs: list[Pair] = []
    for _ in range(count):
        told = "?"
        for _ in range(guesses):
            guess = str(chance.randrange(numbers))
            pairs.append((told, guess))
            told += f"{guess}<eos>{chance.choice(WORDS[:2])}"
    return pairs


def prepare(out: Path, *, numbers: int = 8, guesses: int = 3, updates: int = 60, seed: int = 1) -> None:
    for split, count in (("train", 512), ("test", 64)):
        rows = [
            {
                "data_source": "guessing",
                "prompt": [{"role": "user", "content": "?"}],
                "agent_name": "tool_agent",
                "extra_info": {"index": i, "interaction_kwargs": {"name": "guessing", "secret": i % numbers}},
            }
            for i in range(count)
        ]
        write(rows, out / "data" / f"{split}.parquet")
    tokenizer = tiny_tokenizer(WORDS)
    model = tiny_model(tokenizer, hidden=48, seed=seed)
    for update in teach(model, tokenizer, random_games(2000, numbers, guesses, seed), seed=seed, lr=3e-3):
        if update == updates:
            break
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/guessing_game"))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    prepare(asked.out, seed=asked.seed)
