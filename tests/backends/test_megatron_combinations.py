"""Every combination of parallel sizes on four ranks trains as one process does: `make test-megatron`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.backends.ranks import pytest_as_ranks

RANKS = Path(__file__).with_name("ranks_megatron_combinations.py")
"""Imported by ranks only."""
PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_combinations_on_four_ranks(algorithm, tmp_path, monkeypatch):
    """The largest difference of a metric is in the table of docs/distributed.md."""
    gaps = tmp_path / "gaps"
    monkeypatch.setenv("GAPS", str(gaps))
    pytest_as_ranks(4, [str(RANKS), "-k", algorithm], timeout=3600)
    rows = [json.loads(line) for line in gaps.read_text().splitlines()]
    assert len({row["combination"] for row in rows}) == 8
    shown = PAGE.read_text()
    for row in rows:
        print(algorithm, row["combination"], f"{row['gap']:.1e} {row['metric']} in step {row['step']}")
        assert f"| {row['combination']} |" in shown
        assert row["gap"] <= 1e-5
