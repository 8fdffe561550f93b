"""Every combination of parallel sizes on four ranks trains as one process does: `make test-megatron`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.backends import ranks_megatron_combinations
from tests.backends.ranks import pytest_as_ranks
from tests.backends.ranks_megatron_combinations import COMBINATIONS

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_combinations_on_four_ranks(algorithm, tmp_path, monkeypatch):
    """The largest difference of a metric is in the table of docs/distributed.md."""
    gaps = tmp_path / "gaps"
    monkeypatch.setenv("GAPS", str(gaps))
    pytest_as_ranks(4, [ranks_megatron_combinations.__file__, "-k", algorithm], timeout=3600)
    rows = [json.loads(line) for line in gaps.read_text().splitlines()]
    assert [row["combination"] for row in rows] == list(COMBINATIONS)
    shown = PAGE.read_text()
    for row in rows:
        print(algorithm, row["combination"], f"{row['gap']:.1e} {row['metric']} in step {row['step']}")
        assert f"| {row['combination']} |" in shown
        assert row["gap"] <= 1e-5
