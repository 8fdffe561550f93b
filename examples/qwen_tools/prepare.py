"""GSM8K for a model that may call a tool, and the same questions without it:
`python examples/qwen_tools/prepare.py --from train.jsonl test.jsonl`.

Writes {train,test}.parquet with agent_name=tool_agent and plain_{train,test}.parquet without. Both end their
instruction in the same way and have the same rule as their reward.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.data.files import open_rows
from strop.data.make import gsm8k, write

PLAIN = 'Let\'s think step by step and output the final answer after "####".'
WITH_TOOL = (
    "Let's think step by step. Call the calculator for every computation, with a call like this:\n"
    "<tool_call>\n"
    '{"name": "calculator", "arguments": {"expression": "12*3"}}\n'
    "</tool_call>\n"
    'Its result comes back to you. When you know it, output the final answer after "####".'
)


def rows_of(row: dict[str, Any], split: str, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A question for the tool agent, and the same question for one response."""
    made = gsm8k(row, split, index)
    plain = [{"role": "user", "content": f"{row['question']} {PLAIN}"}]
    tool = [{"role": "user", "content": f"{row['question']}\n\n{WITH_TOOL}"}]
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
