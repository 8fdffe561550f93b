"""benchmarks/simulate_scale.py: its decode formula gives the recorded rates, and docs/scaling/simulations.md says what it computed."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
LINES = [
    json.loads(line) for line in (ROOT / "benchmarks/results/simulate_scale.jsonl").read_text().splitlines()
]
PAGE = (
    (ROOT / "docs/scaling/simulations.md")
    .read_text()
    .partition("\n## Simulation of Qwen3-8B and DeepSeek-V3")[2]
)


@pytest.fixture(scope="module")
def simulate():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("simulate_scale")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        sys.modules.pop("simulate_scale")
        sys.modules.pop("simulate_cluster")


def test_the_formula_gives_recorded_rates(simulate):
    checked = list(simulate.checks())
    assert len(checked) == 5
    for line in checked:
        assert 0.95 < line["ratio"] < 1.05, line
    assert checked == [line for line in LINES if "check" in line]


def test_sampling_apart_never_waits_for_more_than_its_age_allows(simulate):
    case = simulate.Case(simulate.QWEN3_8B, simulate.Work(), 16, 512, simulate.recorded_service(), age=2.0)
    line = simulate.best_apart(case)
    assert line["longest_answer"] <= 2.0 * line["step_seconds"]
    older = simulate.best_apart(simulate.replace(case, age=8.0))
    assert older["step_seconds"] < line["step_seconds"]


def test_twice_the_gpus_and_the_work_take_as_long(simulate):
    service = simulate.Service(0.0, 0.0, 0.0, 0.0)
    steps = [
        simulate.shared(
            simulate.Case(simulate.QWEN3_8B, simulate.Work(600.0, 0.0, 600), gpus, 64 * gpus, service)
        )
        for gpus in (16, 32)
    ]
    assert steps[0]["step_seconds"] == pytest.approx(steps[1]["step_seconds"], rel=1e-3)
    # A GPU with equal lengths: steps of 64 rows, by hand.
    lengths = np.full((1, 64), 600)
    by_hand = sum(
        float(simulate.decode_seconds(simulate.QWEN3_8B, np.array(64), np.array(64 * (256 + at))))
        for at in range(600)
    )
    found = float(simulate.rollout_seconds(simulate.QWEN3_8B, simulate.Work(600.0, 0.0, 600), lengths)[0])
    assert found == pytest.approx(by_hand + 8 * 256 * 2 * 7.57e9 / 350e12, rel=0.01)


def test_the_page_has_the_numbers_of_the_file():
    rows = [line for line in LINES if "way" in line]
    shown = re.findall(
        r"\| (shared|apart \((\d+) \+ (\d+)\)) \| ([\d.]+) s \|.*\| ([\d.,]+)k \| ([\d,]+) \|", PAGE
    )
    assert len(shown) == len(rows) == 11
    for (way, sampling, _, seconds, thousands, each), line in zip(shown, rows):
        assert way.split()[0] == line["way"]
        if sampling:
            assert int(sampling) == line["sampling_gpus"]
        assert round(line["step_seconds"]) == int(seconds)
        assert float(thousands.replace(",", "")) == pytest.approx(line["tokens_per_second"] / 1000, rel=0.005)
        assert int(each.replace(",", "")) == round(line["tokens_per_second_per_gpu"])
    for line in LINES:
        if "published_seconds" in line:
            assert f"| {line['published_seconds']} s | {line['step_seconds']:.1f} s |" in PAGE
