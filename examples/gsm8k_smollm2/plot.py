"""The curves of a run as a PNG: `python plot.py --metrics metrics.jsonl --out curve.png`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.run.chart import line_chart

HELD_OUT = "val-core/openai/gsm8k/reward/mean@1"
REWARD = "critic/score/mean"


def series(rows: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, percent) of every row that has the metric."""
    return [(row["step"], 100 * row["data"][name]) for row in rows if name in row["data"]]


def smoothed(points: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """The mean of each point and the `width` - 1 before it; the first points, which have fewer, are left
    out."""
    return [
        (points[i][0], sum(y for _, y in points[i + 1 - width : i + 1]) / width)
        for i in range(width - 1, len(points))
    ]


def main(arguments: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metrics", default="runs/gsm8k_smollm2/grpo/metrics.jsonl")
    parser.add_argument("--out", default="runs/gsm8k_smollm2/curve.png")
    parser.add_argument(
        "--smooth", type=int, default=10, help="steps over which the training reward is averaged"
    )
    asked = parser.parse_args(arguments)
    rows = [json.loads(line) for line in Path(asked.metrics).read_text().splitlines()]
    reward = series(rows, REWARD)
    curves = {
        "test split greedy": series(rows, HELD_OUT),
        "training reward temperature 1": smoothed(reward, max(1, min(asked.smooth, len(reward)))),
    }
    chart = line_chart(
        asked.out,
        {name: points for name, points in curves.items() if points},
        title="gsm8k strict accuracy in percent",
    )
    print(f"drawn: {chart}")
    return chart


if __name__ == "__main__":
    main()
