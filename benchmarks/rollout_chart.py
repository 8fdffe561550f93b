"""A picture of benchmarks/rollout.py's results: tokens per second of every engine, one group of bars per
work.

    python benchmarks/rollout_chart.py benchmarks/results/rollout_h200.jsonl \\
        benchmarks/results/rollout_h200.png

Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NAMES = {
    "native": "Strop",
    "vllm": "vLLM in the process",
    "vllm-mp": "vLLM in its own process",
    "hf": "transformers",
}
COLOURS = {"native": "#1f6feb", "vllm": "#8b949e", "vllm-mp": "#c9d1d9", "hf": "#e3b341"}


def read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By work and engine; a work that was measured again counts as in its last run. A run ends with a line of
    ratios."""
    works: dict[str, dict[str, dict[str, Any]]] = {}
    run: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if "engine" in line:
            run[line["engine"]] = line
        else:
            works[f"{line['model'].removeprefix('random ')}\n{line['work']}"], run = run, {}
    return works


def draw(works: dict[str, dict[str, dict[str, Any]]], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(works), figsize=(3.1 * len(works), 3.4), constrained_layout=True)
    for axis, (title, engines) in zip(axes if len(works) > 1 else [axes], works.items()):
        best = max(line["tokens_per_second"] for name, line in engines.items() if name != "native")
        for i, (name, line) in enumerate(engines.items()):
            rate = line["tokens_per_second"] / 1000
            spread = [[rate - line["min"] / 1000], [line["max"] / 1000 - rate]]
            axis.bar(
                i,
                rate,
                color=COLOURS.get(name, "#57606a"),
                label=NAMES.get(name, name),
                yerr=spread,
                capsize=3,
            )
            text = f"{rate:.0f}k" + (f"\n{line['tokens_per_second'] / best:.1f}x" if name == "native" else "")
            axis.annotate(text, (i, line["max"] / 1000), ha="center", va="bottom", fontsize=9)
        axis.set_title(title, fontsize=9)
        axis.set_xticks([])
        axis.margins(y=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.supylabel("thousand tokens per second", fontsize=9)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    draw(read(Path(sys.argv[1])), Path(sys.argv[2]))
