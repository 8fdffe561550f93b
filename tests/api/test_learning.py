"""A trainer in ten lines learns: a small task in seconds, and the quickstart's in minutes (slow)."""

from __future__ import annotations

import io
from pathlib import Path
from statistics import mean

import pytest

import strop
from strop.quickstart import quickstart
from tests.api.scene import small


def sevens(completion: str, **row: object) -> float:
    """The share of sevens among the four tokens of a response."""
    return completion.count("7") / 4


def test_ten_lines_learn_a_small_task(task: Path, tmp_path: Path) -> None:
    more = {"reward": sevens, "steps": 14, "n": 8, "lr": 2e-2, "save_freq": -1}
    run = strop.grpo(**small(task, tmp_path / "run", more))  # type: ignore[arg-type]
    scores = run.metrics["critic/score/mean"]
    assert scores[0] < 0.5 and scores[-1] > 0.9, scores  # type: ignore[operator]


@pytest.mark.slow
def test_ten_lines_solve_the_quickstart(tmp_path: Path) -> None:
    """The settings are those of quickstart.yaml."""
    quickstart.prepare(tmp_path, largest=49, seed=1, say=io.StringIO().write)

    def reward(completion: str, ground_truth: str, **row: object) -> float:
        return float(completion.strip() == ground_truth)

    run = strop.grpo(
        tmp_path / "model",
        train=tmp_path / "data" / "train.parquet",
        reward=reward,
        val=tmp_path / "data" / "test.parquet",
        folder=tmp_path / "run",
        **{"steps": 320, "batch_size": 64, "lr": 7e-4, "lr_scheduler_type": "cosine", "test_freq": 80},
        **{"max_prompt_length": 12, "max_response_length": 8, "enable_gradient_checkpointing": False},
    )
    assert mean(run.metrics["critic/score/mean"][-10:]) > 0.9  # type: ignore[type-var]
    answers = strop.evaluate(
        run.model,
        tmp_path / "data" / "test.parquet",
        reward,
        tokenizer=run.tokenizer,
        **{"temperature": 0, "max_prompt_length": 12, "max_response_length": 8},
    )
    assert answers["score"] > 0.9, answers
