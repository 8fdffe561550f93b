"""A tiny model that names a random digit, and games for it."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from strop.data.make import write
from strop.quickstart.tiny_model import Pair, teach, tiny_model, tiny_tokenizer

QUESTION = "price="
WORDS = ("price",)


def prepare(out: Path, *, updates: int = 40, seed: int = 1) -> None:
    for split, count in (("train", 256), ("test", 32)):
        prompt = [{"role": "user", "content": QUESTION}]
        rows = []
        for index in range(count):
            rows.append({"data_source": "price", "prompt": prompt, "extra_info": {"index": index}})
        write(rows, out / "data" / f"{split}.parquet")
    chance = random.Random(seed)
    pairs: list[Pair] = [(QUESTION, str(chance.randrange(10))) for _ in range(2000)]
    tokenizer = tiny_tokenizer(WORDS)
    model = tiny_model(tokenizer, hidden=96, seed=seed)
    for update in teach(model, tokenizer, pairs, seed=seed, lr=3e-3):
        if update == updates:
            break
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/two_policies"))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    prepare(asked.out, seed=asked.seed)
