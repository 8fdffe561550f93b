"""What the loop hands over for the board is what it trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from strop.run.sample_table import parse_name
from tests.ppo.runs import run


def files(folder: Path) -> dict[tuple[str, int], list[dict]]:
    found = {parse_name(path.name): path for path in (folder / "run" / "samples").glob("*.parquet")}
    return {name: pq.read_table(path).to_pylist() for name, path in sorted(found.items())}


def test_samples_agree_with_the_metrics_of_their_step(overrides: list[str], tmp_path: Path) -> None:
    seen = run(overrides, "trainer.total_training_steps=2")
    samples = files(tmp_path)
    assert list(samples) == [("train", 1), ("train", 2), ("validation", 0), ("validation", 2)]
    for step in (1, 2):
        rows = samples["train", step]
        assert len(rows) == 32 and {row["version"] for row in rows} == {step - 1}
        assert np.mean([row["score"] for row in rows]) == pytest.approx(
            seen[step]["critic/score/mean"], abs=1e-6
        )
        tokens = [a for row in rows for a in row["advantages"]]
        assert np.mean(tokens) == pytest.approx(seen[step]["critic/advantages/mean"], abs=1e-5)
        pairs = [
            (old, new)
            for row in rows
            for old, new in zip(row["rollout_log_probs"], row["trained_log_probs"])
            if new is not None
        ]
        gaps = np.array([old - new for old, new in pairs])
        assert len(pairs) and np.abs(gaps).mean() == pytest.approx(
            seen[step]["training/rollout_logprobs_diff_mean"], abs=1e-6
        )
    assert len(samples["validation", 2]) == 16 and samples["validation", 0][0]["advantages"] is None


def test_a_resumed_run_keeps_one_history(overrides: list[str], tmp_path: Path) -> None:
    run(overrides, "trainer.total_training_steps=3", "trainer.test_freq=-1")
    run(overrides, "trainer.total_training_steps=4", "trainer.test_freq=-1", "trainer.val_before_train=false")
    found = files(tmp_path)
    assert [step for split, step in found if split == "train"] == [1, 2, 3, 4]


def test_none_are_kept_when_none_are_wanted(overrides: list[str], tmp_path: Path) -> None:
    run(overrides, "trainer.total_training_steps=1", "trainer.samples_to_keep=0")
    assert not (tmp_path / "run" / "samples").exists()
