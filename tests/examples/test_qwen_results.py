"""The accuracies in the tables of examples/qwen_*: those of the metrics beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
GSM8K = "val-core/openai/gsm8k/reward/mean@1"


def accuracies(file: str, metric: str = GSM8K) -> dict[int, str]:
    """Percent by step."""
    found = {}
    for line in (EXAMPLES / file).read_text().splitlines():
        row = json.loads(line)
        if metric in row["data"]:
            found[row["step"]] = f"{100 * row['data'][metric]:.1f}%"
    return found


def tables(readme: str, column: int) -> dict[int, list[str]]:
    """The cells of a column by the step in the first column, of all tables with a column `step`."""
    found: dict[int, list[str]] = {}
    for line in (EXAMPLES / readme).read_text().splitlines():
        cells = [cell.strip(" *") for cell in line.split("|")[1:-1]]
        if len(cells) > column and cells[0].isdecimal():
            found.setdefault(int(cells[0]), []).append(cells[column])
    return found


@pytest.mark.parametrize(("column", "kind"), [(1, "instances"), (2, "families")])
def test_generated_mathematics(column, kind):
    metrics = accuracies("qwen_math/results/grpo.jsonl", f"val-core/generated_math/{kind}/reward/mean@1")
    assert {step: cells[0] for step, cells in tables("qwen_math/README.md", column).items()} == metrics


def test_with_and_without_the_tool():
    shown = {column: tables("qwen_tools/README.md", column) for column in (1, 2)}
    tool = accuracies("qwen_tools/results/tool.jsonl")
    plain = accuracies("qwen_tools/results/plain.jsonl")
    first = accuracies("qwen_tools/results/plain_first.jsonl")
    for step in (0, 10, 20):
        assert shown[1][step][0] == tool[step]
        assert shown[2][step][0] == ", ".join(run[step] for run in (plain, first) if step in run)


def test_long_run_of_the_small_model():
    lines = (EXAMPLES / "qwen_gsm8k/README.md").read_text().splitlines()
    start = lines.index("| step | 25 | 50 | 75 | 100 | 125 | 150 | 175 | 200 | 225 | 250 | 275 |")
    steps, cells = (
        [cell.strip(" *") for cell in line.split("|")[2:-1]] for line in (lines[start], lines[start + 2])
    )
    shown = dict(zip(map(int, steps), cells, strict=True))
    assert shown == accuracies("qwen_gsm8k/results/grpo_two_updates.jsonl")


def test_distillation_by_samples_and_tokens():
    page = (EXAMPLES / "qwen_distillation/README.md").read_text().partition("## GRPO after")[0]
    rows = [line.split("|")[1:-1] for line in page.splitlines() if re.match(r"\| [\d,]+ \|", line)]
    shown = {}
    for samples, forward_kl, *_ in rows:
        if forward_kl.strip():
            accuracy, step = re.fullmatch(r"\**([\d.]+%)\** \(step (\d+)\)", forward_kl.strip()).groups()
            assert int(samples.replace(",", "")) == 512 * int(step)
            shown[int(step)] = accuracy
    assert shown == accuracies("qwen_distillation/results/on_policy.jsonl")
    metrics = [
        json.loads(line)["data"]
        for line in (EXAMPLES / "qwen_distillation/results/on_policy.jsonl").read_text().splitlines()
    ]
    for steps in (30, 50):
        tokens = 512 * sum(row["response_length/mean"] for row in metrics[:steps])
        said = re.search(rf"top 32 \| ([\d,]+) \| {4 * steps} \|", page)
        assert said is not None and abs(int(said[1].replace(",", "")) - tokens) < 100


@pytest.mark.parametrize(("column", "run"), [(1, "on_policy_varied"), (2, "then_grpo")])
def test_grpo_after_distillation(column, run):
    shown = {step: cells[0] for step, cells in tables("qwen_distillation/README.md", column).items()}
    metrics = accuracies(f"qwen_distillation/results/{run}.jsonl")
    assert {step: cell for step, cell in shown.items() if cell} == metrics
