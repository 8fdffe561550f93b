"""The model and the problems of examples/tool_calculator, for an agent that brings its tools along: the chat
template lists them, and rows name no agent."""

from __future__ import annotations

import argparse
from pathlib import Path

from strop.data.make import arithmetic, write
from strop.quickstart.tiny_model import Pair, teach, tiny_model, tiny_tokenizer

# Like ChatML, with a token for each part. Results of tools stand behind <tool>, answers behind <answer>.
TEMPLATE = (
    "{% for t in tools or [] %}<tools>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<answer>{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}<tool>{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)
LISTED = "<tools>calculator"
CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'
WORDS = (
    "<answer>",
    "<tools>",
    "<tool>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "',
    "calculator",
    '", "arguments": {"expression": "',
    '"}}',
)
CALLED = 7
"""One question in so many is answered with a call of the tool."""


def examples(questions: list[tuple[str, str]]) -> list[Pair]:
    """What stands before an answer, and the answer. What to do with a result is shown for every question."""
    pairs: list[Pair] = []
    for place, (question, number) in enumerate(questions):
        call = CALL.format(question.removesuffix("="))
        before = f"{LISTED}{question}<answer>"
        pairs.append((before, number if place % CALLED else call))
        pairs.append((f"{before}{call}<eos><tool>{number}<answer>", number))
    return pairs


def prepare(out: Path, *, size: int = 6000, test_size: int = 100, updates: int = 300, seed: int = 1) -> None:
    made = arithmetic(size, test_size, digits=2, operators="*", seed=seed)
    for split, rows in made.items():
        write(rows, out / "data" / f"{split}.parquet")
    questions = [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in made["train"]]
    tokenizer = tiny_tokenizer(WORDS, TEMPLATE)
    model = tiny_model(tokenizer, hidden=64, seed=seed)
    for update in teach(model, tokenizer, examples(questions), seed=seed, lr=4e-3):
        if update == updates:
            break
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/agents_sdk"))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    prepare(asked.out, seed=asked.seed)
