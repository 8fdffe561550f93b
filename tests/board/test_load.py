"""Many readers at once while a run writes: everybody is answered, and the server's memory stays where it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "board.py"


@pytest.mark.slow
def test_fifty_readers_and_one_writer(tmp_path: Path) -> None:
    asked = [
        "--samples",
        "5000",
        "--readers",
        "50",
        "--seconds",
        "2",
        "--pause",
        "1",
        "--work",
        str(tmp_path),
    ]
    done = subprocess.run([sys.executable, str(SCRIPT), *asked], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    readers = told["readers"]
    assert (
        readers["errors"] == [] and readers["other"]["requests"] > 50 and readers["search"]["requests"] > 5
    ), readers
    assert readers["other"]["p95_s"] < 5 and readers["search"]["p95_s"] < 10, readers
    assert readers["mb_peak"] < 400 and readers["mb_after"] - readers["mb_before"] < 150, readers
    assert told["seconds"]["search_all_steps_one_answer"] < 5
