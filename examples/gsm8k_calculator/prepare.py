"""GSM8K for a model that calls a calculator: `python prepare.py --from train.jsonl test.jsonl`.

The worked solutions mark every computation (`48/2 = <<48/2=24>>24`). Here each mark becomes a tool call: the
solution up to it, the call, the tool's answer as a turn of its own, and the solution goes on. Writes
sft_{train,test}.parquet (conversations to learn from, column `messages`) and {train,test}.parquet (prompts
with agent_name=tool_agent).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.data.files import open_rows
from strop.data.make import gsm8k, write

INSTRUCTION = (
    "Solve the problem step by step. For each computation call the calculator like this:\n"
    '<tool_call>{"name": "calculator", "arguments": {"expression": "12*3"}}</tool_call>\n'
    "End with the final answer after ####."
)
_MARK = re.compile(r"<<([^=<>]+)=([^<>]+)>>")


def turns(answer: str) -> list[dict[str, str]]:
    """A worked solution as turns of the assistant and the calculator.

    >>> turns("He has 1+2 = <<1+2=3>>3 pears.\\n#### 3")[1:]
    [{'role': 'tool', 'content': '3'}, {'role': 'assistant', 'content': '3 pears.\\n#### 3'}]
    """
    made: list[dict[str, str]] = []
    place = 0
    for mark in _MARK.finditer(answer):
        call = json.dumps({"name": "calculator", "arguments": {"expression": mark[1].strip()}})
        made.append(
            {"role": "assistant", "content": f"{answer[place : mark.start()]}<tool_call>{call}</tool_call>"}
        )
        made.append({"role": "tool", "content": mark[2].strip()})
        place = mark.end()
    return [*made, {"role": "assistant", "content": answer[place:]}]


def converted(row: dict[str, Any], split: str, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row to learn from by example, and the same for reinforcement."""
    prompt = [{"role": "user", "content": f"{INSTRUCTION}\n\n{row['question']}"}]
    reinforced = {**gsm8k(row, split, index), "prompt": prompt, "agent_name": "tool_agent"}
    return {"messages": [*prompt, *turns(row["answer"])]}, reinforced


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", nargs=2, required=True, metavar=("TRAIN", "TEST"), dest="files")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k_calculator/data"))
    asked = parser.parse_args(arguments)
    for split, file in zip(("train", "test"), asked.files):
        pairs = [converted(dict(row), split, index) for index, row in enumerate(open_rows(file))]
        write([example for example, _ in pairs], asked.out / f"sft_{split}.parquet")
        write([row for _, row in pairs], asked.out / f"{split}.parquet")


if __name__ == "__main__":
    main()
