"""Forecasts against what an H200 really used: benchmarks/results/plan_memory.jsonl, made by benchmarks/plan_memory.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.planning.activations import Numbers, Tokens
from strop.planning.devices import CONTEXT, GIB, SLACK, WORKSPACE
from strop.planning.forecast import taken
from strop.planning.rollout import PlannedSampler
from strop.planning.shape import shape_of
from strop.planning.training import TrainedModel

ROOT = Path(__file__).parents[2]
LINES = [
    json.loads(line) for line in (ROOT / "benchmarks/results/plan_memory.jsonl").read_text().splitlines()
]
H200 = int(139.8 * GIB)
ROW, ROW_PROMPT = 1024, 256


def foretold(line: dict) -> tuple[float, float]:
    """GiB that torch hands out at the peak, and GiB that the device loses, as the planner says."""
    shape = shape_of(f"qwen2.5-{line['shape']}")
    variant = line["variant"]
    numbers = Numbers(master=2 if variant == "bf16" else 4)
    rank = 32 if variant == "lora" else 0
    model = TrainedModel(
        shape, numbers, checkpointing="none" if variant == "plain" else "full", lora_rank=rank, kernels=True
    )
    sampler = PlannedSampler(
        shape, 1024, 128, 256, max_rows=1024, batch_tokens=32768, share=0.5, samples=4, numbers=numbers
    )
    # The optimizer remembers nothing before the first update.
    stepped = not line["phase"].startswith("rollout") and not (
        line["phase"] == "log_prob" and line["tokens"] == 8192
    )
    rest = model.weights + model.optimizer * stepped + WORKSPACE
    cache = sampler.cache(H200, rest)
    if line["phase"].startswith("rollout"):
        parts = {
            "cache": cache + sampler.bookkeeping(cache),
            "step": max(sampler.decoding, sampler.prefilling),
        }
        outside = CONTEXT + sampler.recorded
    else:
        kept = cache if cache * 20 <= H200 else 0  # what the engine kept when this was measured
        tokens = Tokens(line["tokens"] // ROW * (ROW - 1), line["tokens"] // ROW * (ROW - ROW_PROMPT))
        two = "2 micro" in line["phase"]
        parts = (
            model.forward(tokens)
            if line["phase"] == "log_prob"
            else model.update(tokens, accumulated=two, entropy=True)
        )
        parts = {**parts, "cache": kept + sampler.bookkeeping(kept)}
        outside = CONTEXT + SLACK + (sampler.recorded if kept else 0)
    used = rest + sum(taken(part, size) for part, size in parts.items()) + outside
    return (rest + sum(parts.values())) / GIB, used / GIB


@pytest.mark.parametrize(
    "line", LINES, ids=lambda line: f"{line['shape']}-{line['phase']}-{line.get('tokens', '')}"
)
def test_what_torch_hands_out_is_foretold(line):
    assert foretold(line)[0] == pytest.approx(line["measured_gib"], rel=0.15)


@pytest.mark.parametrize(
    "line", LINES, ids=lambda line: f"{line['shape']}-{line['phase']}-{line.get('tokens', '')}"
)
def test_what_the_device_loses_is_foretold(line):
    assert foretold(line)[1] == pytest.approx(line["device_gib"], rel=0.15)


def telling(line: dict) -> bool:
    """Not the same again: a first rollout, a second micro-batch, what checkpointing does not change."""
    repeated = line["variant"] == "plain" and not line["phase"].startswith("update")
    return not repeated and line["phase"] != "rollout, first" and "2 micro" not in line["phase"]


def table() -> str:
    rows = [
        "| shape | phase | tokens | torch GiB, estimated | measured | device GiB, estimated | measured |",
        "|" + " --- |" * 7,
    ]
    for line in filter(telling, LINES):
        allocated, used = foretold(line)
        rows.append(
            f"| {line['shape']}, {line['variant']} | {line['phase']} | {line.get('tokens', '')} | {allocated:.2f} | "
            f"{line['measured_gib']:.2f} | {used:.2f} | {line['device_gib']:.2f} |"
        )
    return "\n".join(rows)
