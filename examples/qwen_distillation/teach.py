"""Answers of the teacher as rows for SFT:
`python examples/qwen_distillation/teach.py answers.parquet --tokenizer MODEL --tokens 12000000`.

`answers.parquet` is what `strop generate` wrote with the teacher. Answers are taken round by round (the first
answer to every question, then the second) until they have as many tokens as the on-policy run sampled, so
that both ways learn from the same number of tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from strop.config.schema.model import ModelConfig
from strop.data.files import open_rows
from strop.data.make import write
from strop.models.build import build_tokenizer


def by_rounds(rows: Sequence[dict[str, Any]], seed: int) -> Iterator[tuple[list[dict[str, str]], str]]:
    """(prompt, answer): the first answers of all rows in random order, then the second ones."""
    draw = random.Random(seed)
    most = max(len(row["responses"] or ()) for row in rows)
    for number in range(most):
        order = list(rows)
        draw.shuffle(order)
        for row in order:
            answers = row["responses"] or ()
            if number < len(answers):
                yield [dict(message) for message in row["prompt"]], answers[number]


def chosen(
    pairs: Iterable[tuple[list[dict[str, str]], str]], tokenizer: Any, tokens: int
) -> tuple[list[dict[str, Any]], int]:
    """Conversations until their answers have `tokens` tokens, end of text included; and how many these "
    "are."""
    made: list[dict[str, Any]] = []
    total = 0
    for prompt, answer in pairs:
        if total >= tokens:
            break
        total += len(tokenizer.encode(answer, add_special_tokens=False)) + 1
        made.append({"messages": [*prompt, {"role": "assistant", "content": answer}]})
    if total < tokens:
        raise ValueError(
            f"The answers have {total} tokens in all, which is less than --tokens {tokens}. Generate more "
            "answers per question (data.n_samples), or ask for fewer tokens."
        )
    return made, total


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answers", type=Path)
    parser.add_argument("--tokenizer", required=True, help="the student's model")
    parser.add_argument("--tokens", type=int, required=True, help="of all answers together")
    parser.add_argument("--out", type=Path, default=Path("runs/qwen_distillation/data/sft.parquet"))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    rows = [dict(row) for row in open_rows(str(asked.answers))]
    tokenizer = build_tokenizer(ModelConfig(path=asked.tokenizer))
    made, total = chosen(by_rounds(rows, asked.seed), tokenizer, asked.tokens)
    write(made, asked.out)
    print(f"{asked.out}: {len(made)} answers of {total} tokens")


if __name__ == "__main__":
    main()
