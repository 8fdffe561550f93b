"""The task that all frameworks of this folder run: GRPO on GSM8K with a strict reward.

Its settings, data files and reward are written once, here. The reward functions have the signatures that verl
(`compute_score`) and OpenRLHF (`reward_func`) load from a file. Needs the standard library, pyarrow to write
and read parquet, and torch where OpenRLHF asks for tensors.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SOURCE = "openai/gsm8k"
FINAL = re.compile(r"#### (\-?[0-9\.\,]+)")
PHASES = ("rollout", "log_probs", "update", "weight_sync", "other")


def final_number(text: str) -> str:
    """The number after the last `#### `, or nothing."""
    found = FINAL.findall(text)
    return found[-1].replace(",", "") if found else ""


def score(text: str, answer: str) -> float:
    """1.0 where the number after the last `#### ` is the answer, else 0.0."""
    return float(bool(answer) and final_number(text) == answer)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """verl's signature of a reward function."""
    return score(solution_str, ground_truth)


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **_: Any) -> dict[str, Any]:
    """OpenRLHF's signature: a query is the prompt and the completion."""
    import torch

    scores = [score(query[len(prompt) :], label) for query, prompt, label in zip(queries, prompts, labels)]
    rewards = torch.tensor(scores)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The settings that every framework gets; defaults are those of the comparison."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder with safetensors, config and tokenizer")
    add("--out", type=Path, required=True, help="folder for the logs of one run; its `data` has the prompts")
    add("--steps", type=int, required=True)
    add("--prompts", type=int, default=128, help="per step")
    add("--samples", type=int, default=8, help="per prompt")
    add("--tokens", type=int, default=512, help="at most, per response")
    add("--prompt-tokens", type=int, default=512, help="at most, per prompt")
    add("--lr", type=float, default=3e-6, help="constant")
    add("--seed", type=int, default=1)
    add("--eval-every", type=int, default=0, help="steps between greedy evaluations; 0: none")
    add("--log-probs", action="store_true", help="also measure how far sampler and trainer differ")
    add("--engine-memory", type=float, default=0.25, help="share of GPU memory for vLLM")
    add("--tokens-per-pass", type=int, default=16384, help="of packed micro-batches")
    add("--sequences-per-pass", type=int, default=64, help="of padded micro-batches")
    add(
        "--attention",
        default="auto",
        help="auto: flash_attention_2 where flash_attn can be imported, else sdpa",
    )
    add("--dry", action="store_true", help="print the command and stop")
    add("--extra", action="append", default=[], help="one more argument of the framework; may be repeated")
    return parser


def questions(file: Path) -> list[dict[str, str]]:
    """Prompt and answer of each row: GSM8K's JSON lines, or the parquet file of `strop data gsm8k`."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(file, columns=["prompt", "reward_model"]).to_pylist()
        return [
            {"prompt": row["prompt"][0]["content"], "answer": row["reward_model"]["ground_truth"]}
            for row in rows
        ]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        {"prompt": f"{row['question']} {INSTRUCTION}", "answer": final_number(row["answer"])} for row in rows
    ]


def epochs(rows: list[dict[str, str]], count: int, seed: int) -> list[dict[str, str]]:
    """`count` rows: as many shuffled passes over all rows as needed."""
    order = random.Random(seed)
    drawn: list[dict[str, str]] = []
    while len(drawn) < count:
        drawn.extend(order.sample(rows, len(rows)))
    return drawn[:count]


def write_data(folder: Path, train: Path, test: Path, rows: int, held_out: int, seed: int) -> None:
    """The files of both splits, once as JSON lines and once as parquet with verl's columns.

    All frameworks read the training rows of a run in this order, once (OpenRLHF shuffles them again).
    """
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": epochs(questions(train), rows, seed), "test": questions(test)[:held_out]}
    for split, drawn in splits.items():
        lines = [json.dumps(row) + "\n" for row in drawn]
        (folder / f"{split}.jsonl").write_text("".join(lines))
        table = [
            {
                "data_source": SOURCE,
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": row["answer"]},
                "extra_info": {"split": split, "index": index},
            }
            for index, row in enumerate(drawn)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), folder / f"{split}.parquet")


def jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def step_record(
    step: int, seconds: float, phases: dict[str, float], tokens: float, reward: float, **more: float | None
) -> dict[str, Any]:
    """One training step: what no phase covers is `other`."""
    known = {name: phases.get(name, 0.0) for name in PHASES[:-1]}
    known["other"] = seconds - sum(known.values())
    return {"step": step, "seconds": seconds, "phases": known, "tokens": tokens, "reward": reward, **more}


def write_records(out: Path, records: Iterable[dict[str, Any]], versions: dict[str, str]) -> None:
    """`records.jsonl`, which `compare.py` reads: one line per step or evaluation, the versions first."""
    lines = [json.dumps({"versions": versions, "written": time.time()})]
    lines += [json.dumps(record) for record in records]
    (out / "records.jsonl").write_text("\n".join(lines) + "\n")


def end_on_sigterm() -> None:
    """SIGTERM ends the process as `sys.exit` does, so that records of the steps so far are written."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def attention(options: argparse.Namespace) -> str:
    import importlib.util

    if options.attention != "auto":
        return str(options.attention)
    return "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"


def versions_of(*names: str) -> dict[str, str]:
    """Installed versions; a package that is not there is left out."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
