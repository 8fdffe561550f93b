"""Reinforcement learning from Python: one run of the whole surface, its command line, and what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.cli import main
from tests.api.scene import digits, small
from tests.runtime.started import assert_same_run


def arguments(command: str) -> list[str]:
    """The words of a command line after `strop`."""
    return shlex.split(command.replace("\\\n", " "))[1:]


@pytest.fixture(scope="module")
def run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> strop.Run[Any]:
    """Two steps, with callbacks that note what they get."""
    folder = tmp_path_factory.mktemp("run")
    run = strop.grpo(**small(task, folder / "run", {"reward": digits}))  # type: ignore[arg-type]
    return run


def test_a_run_leaves_metrics_samples_and_a_plain_model(run: strop.Run[Any], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert run.finished and run.step == run.total_steps == 2
    assert run.metrics["step"] == [1, 2]
    assert run.config.algorithm.adv_estimator == "grpo" and run.config.trainer.total_training_steps == 2
    samples = run.samples()
    assert len(samples) == 8 and {row["step"] for row in samples} == {2}
    assert all("+" in str(row["prompt"]) for row in samples)
    ids = torch.tensor([run.tokenizer("1+2=").input_ids])
    loaded = AutoModelForCausalLM.from_pretrained(run.save(tmp_path / "out"))
    assert torch.equal(run.model(ids).logits, loaded(ids).logits)
    assert not run.model.training and run.model.generate(ids, max_new_tokens=2).shape[0] == 1


def test_the_command_line_gives_the_same_numbers(run: strop.Run[Any], tmp_path: Path) -> None:
    words = arguments(run.command())
    assert words[0] == "ppo"
    folder = f"trainer.default_local_dir={tmp_path}/run"
    assert main([word for word in words if "default_local_dir" not in word] + [folder]) == 0
    assert_same_run(run.folder, tmp_path / "run", steps=2)
