"""Accuracy on held-out data by step, a curve per run: `plot.py grpo=metrics.jsonl --out curve.png`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from strop.run.chart import line_chart

HELD_OUT = "val-core/openai/gsm8k/reward/mean@1"


def accuracy(file: Path, metric: str = HELD_OUT) -> list[tuple[float, float]]:
    """(step, percent) of every validation."""
    points = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if metric in row["data"]:
            points.append((float(row["step"]), 100 * row["data"][metric]))
    return points


def main(arguments: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="NAME=METRICS")
    parser.add_argument("--out", default="runs/qwen_gsm8k/curve.png")
    parser.add_argument("--metric", default=HELD_OUT)
    parser.add_argument("--title", default="GSM8K test split, greedy, strict accuracy in percent")
    asked = parser.parse_args(arguments)
    curves = {}
    for run in asked.runs:
        name, _, file = run.partition("=")
        curves[name] = accuracy(Path(file), asked.metric)
        if not curves[name]:
            raise SystemExit(f"{file} has no {asked.metric}: not validated yet, or --metric is wrong.")
    chart = line_chart(asked.out, curves, title=asked.title)
    print(f"drawn: {chart}")
    return chart


if __name__ == "__main__":
    main()
