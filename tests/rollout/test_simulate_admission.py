"""benchmarks/simulate_admission.py: every sample is finished, and a full cache costs what it must."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "simulate_admission.py"
SMALL = ["--prompts", "12", "--samples", "2", "--lengths-lognormal", "300", "0.8", "900", "--headroom", "64"]


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> list[dict[str, float]]:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SMALL, *more])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_full_cache_preempts_and_takes_more_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    roomy = run(monkeypatch, capsys, "--cache-gib", "30")
    # Pages for about 4,000 tokens: the rows want more than twice as many.
    tight = run(monkeypatch, capsys, "--cache-gib", "0.55")
    longest = 900
    for found in roomy:
        assert found["preemptions"] == found["recomputed_tokens"] == 0
        assert found["steps"] <= longest + 16
    for wide, narrow in zip(roomy, tight):
        assert narrow["preemptions"] > 0 and narrow["recomputed_tokens"] > 0
        assert narrow["steps"] > wide["steps"] and narrow["seconds"] > wide["seconds"]
        # The same tokens are sampled; steps go on behind the end of a row until the host looks, every 16.
        sampled = [found["steps"] * found["rows"] for found in (wide, narrow)]
        assert sampled[1] == pytest.approx(sampled[0], rel=0.05)
        assert narrow["use"] <= 1
