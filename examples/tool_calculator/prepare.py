"""A tiny model that knows how a tool is called, seldom does it, and cannot multiply by itself; and problems
for it.

It learns by example from two kinds of answers to the same questions: most say a number at once, some call the
calculator first. Which is better it is not told.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from strop.data.make import arithmetic, write
from strop.quickstart.tiny_model import Pair, teach, tiny_model, tiny_tokenizer

# Like ChatML, with a token for each part. Results of tools stand behind <tool>, answers behind <answer>.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<answer>{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}<tool>{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)
OPEN, CLOSE = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
WORDS = (
    "<answer>",
    "<tool>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "',
    "calculator",
    '", "arguments": {"expression": "',
    '"}}',
)


def examples(questions: list[tuple[str, str]], share: float, seed: int) -> list[Pair]:
    """What stands before an answer, and the answer; a `share` of the questions calls the tool.

    What to do with a result is shown for every question.
    """
    chance = random.Random(seed)
    pairs: list[Pair] = []
    for question, number in questions:
        call = f"{OPEN}{question.removesuffix('=')}{CLOSE}"
        pairs += [(f"{question}<answer>", call if chance.random() < share else number)]
        pairs += [(f"{question}<answer>{call}<eos><tool>{number}<answer>", number)]
    return pairs


def prepare(
    out: Path,
    *,
    size: int = 6000,
    test_size: int = 200,
    updates: int = 300,
    share: float = 0.15,
    seed: int = 1,
) -> None:
    made = arithmetic(size, test_size, digits=2, operators="*", seed=seed)
    for split, rows in made.items():
        write([{**row, "agent_name": "tool_agent"} for row in rows], out / "data" / f"{split}.parquet")
    questions = [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in made["train"]]
    tokenizer = tiny_tokenizer(WORDS, TEMPLATE)
    model = tiny_model(tokenizer, hidden=64, seed=seed)
    for update in teach(model, tokenizer, examples(questions, share, seed), seed=seed, lr=4e-3):
        if update == updates:
            break
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tool_calculator"))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    begun = time.time()
    prepare(asked.out, seed=asked.seed)
    sys.stdout.write(f"The model and its problems are in {asked.out}, after {time.time() - begun:.0f} s.\n")
