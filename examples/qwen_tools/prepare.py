"""GSM8K for a model that may call a tool, and the same questions without it:
`python examples/qwen_tools/prepare.py --from train.jsonl test.jsonl`.

Writes {train,test}.parquet with agent_name=tool_agent and plain_{train,test}.parquet without. Each prompt
begins with one solved question, with the tool or without it: from an instruction alone, a 0.5B model copies
the call of the instruction instead of making its own. The reward of both is the same rule.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.data.files import open_rows
from strop.data.make import gsm8k, write

PLAIN = 'Let\'s think step by step and output the final answer after "####".'
WITH_TOOL = (
    "Let's think step by step, call the calculator for the computation of each step, and output the final "
    'answer after "####".'
)
QUESTION = "A box has 4 rows of 6 eggs. 5 of the eggs break. How many whole eggs are left?"


def call(expression: str) -> str:
    """A call in the format that the chat template of Qwen2.5 asks for."""
    arguments = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


PLAIN_EXAMPLE = messages(
    ("user", f"{QUESTION} {PLAIN}"),
    ("assistant", "The box has 4*6 = 24 eggs. 5 of them break, so 24-5 = 19 are left.\n#### 19"),
)
TOOL_EXAMPLE = messages(
    ("user", f"{QUESTION} {WITH_TOOL}"),
    ("assistant", f"The box has 4 rows of 6 eggs.\n{call('4*6')}"),
    ("tool", "24"),
    ("assistant", f"5 of the 24 eggs break.\n{call('24-5')}"),
    ("tool", "19"),
    ("assistant", "19 whole eggs are left.\n#### 19"),
)


def rows_of(row: dict[str, Any], split: str, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A question for the tool agent, and the same question for one response."""
    made = gsm8k(row, split, index)
    plain = [*PLAIN_EXAMPLE, *messages(("user", f"{row['question']} {PLAIN}"))]
    tool = [*TOOL_EXAMPLE, *messages(("user", f"{row['question']} {WITH_TOOL}"))]
    return {**made, "prompt": tool, "agent_name": "tool_agent"}, {**made, "prompt": plain}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", nargs=2, required=True, metavar=("TRAIN", "TEST"), dest="files")
    parser.add_argument("--out", type=Path, default=Path("runs/qwen_tools/data"))
    asked = parser.parse_args(arguments)
    for split, file in zip(("train", "test"), asked.files):
        pairs = [rows_of(dict(row), split, index) for index, row in enumerate(open_rows(file))]
        write([tool for tool, _ in pairs], asked.out / f"{split}.parquet")
        write([plain for _, plain in pairs], asked.out / f"plain_{split}.parquet")


if __name__ == "__main__":
    main()
