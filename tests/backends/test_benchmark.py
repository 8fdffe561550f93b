"""benchmarks/distributed.py at a tiny size: both systems make the same update."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "distributed.py"
SMALL = "--shape tiny --prompts 2 --samples 2 --prompt-length 8 --shortest 4 --longest 8 --tokens 64 --updates 1 --warm-up 1"


@pytest.mark.slow
def test_one_rank_makes_the_update_of_the_single_backend():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL.split(), "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    single, fsdp, ratio = (json.loads(line) for line in done.stdout.splitlines())
    assert (single["system"], fsdp["system"]) == ("single", "fsdp")
    assert fsdp["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-5)
    assert 0 < single["mfu"] < 1 and ratio["fsdp_over_single"] == pytest.approx(
        fsdp["seconds"] / single["seconds"], rel=1e-3
    )
