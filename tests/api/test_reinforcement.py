"""Reinforcement learning from Python: one run of the whole surface, its command line, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.agents.tool_schema import schema_of
from strop.agents.tool_set import ToolSet
from strop.api.reinforcement import data_file, set_defaults
from strop.api.rows import RowKeys
from strop.api.settings import Settings
from strop.cli import main
from strop.config.compose import load
from strop.data.files import open_rows
from strop.rewards.signatures import CallStyle
from tests.api.scene import ROWS, digits, small
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


def test_a_folder_may_be_in_the_home_directory(
    run: strop.Run[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run.save("~/out") == tmp_path / "out" and (tmp_path / "out" / "config.json").exists()
    with pytest.raises(ValueError, match=r"There is no split 'val'. Set split to train or validation"):
        run.samples(split="val")


def test_the_command_line_gives_the_same_numbers(run: strop.Run[Any], tmp_path: Path) -> None:
    words = arguments(run.command())
    assert words[0] == "ppo"
    folder = f"trainer.default_local_dir={tmp_path}/run"
    assert main([word for word in words if "default_local_dir" not in word] + [folder]) == 0
    assert_same_run(run.folder, tmp_path / "run", steps=2)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def test_functions_are_tools(task: Path, tmp_path: Path) -> None:
    """In the run and, by a file of the run, on the command line."""
    more = {"reward": digits, "tools": [add], "steps": 1, "max_prompt_length": 48}
    run = strop.grpo(**small(task, tmp_path / "run", more))  # type: ignore[arg-type]
    rollout = run.config.actor_rollout_ref.rollout
    assert run.finished and rollout.agent.default_agent_loop == "tool_agent"
    limits: dict[str, Any] = {"timeout": 5.0, "max_response_length": 9, "truncate_side": "left"}
    read = ToolSet.from_config(rollout.multi_turn.tool_config_path, max_parallel=1, **limits)
    given = ToolSet.from_config(None, max_parallel=1, functions=[add], **limits)
    assert read.schemas == given.schemas == [schema_of(add).as_openai()]
    for tools in (read, given):
        tools.close()


def test_files_with_columns_of_their_own(task: Path, tmp_path: Path) -> None:
    """A file of plain rows is converted, so that reward functions get its columns; one of the schema is not."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    path, rows = data_file(file, RowKeys(), tmp_path, "train", [(digits, CallStyle.COLUMNS)])
    assert rows == len(ROWS) and path != str(file) and open_rows(path)[0]["extra_info"]["answer"] == "0"
    verl = [(lambda solution_str: 0.0, CallStyle.VERL)]
    assert data_file(file, RowKeys(), tmp_path, "train", verl) == (str(file), len(ROWS))
    schema = task / "data" / "train.parquet"
    given = data_file([schema], RowKeys(), tmp_path, "train", [(digits, CallStyle.COLUMNS)])
    assert given == ([str(schema)], 64)


def test_the_settings_of_a_call(task: Path) -> None:
    """What the caller has set stays; the rest fits the data."""
    settings = Settings("ppo_trainer", {"batch_size": 3, "critic.optim.lr": 1e-5})
    set_defaults(settings, group=8, prompts=3, validates=True)
    config = load("ppo_trainer", settings.arguments()).config
    assert config.data.train_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size == 3
    assert config.actor_rollout_ref.rollout.n == 8 and config.trainer.test_freq == 10
    with pytest.raises(ValueError, match=r"train sets data.train_batch_size, which is also given"):
        settings.set("data.train_batch_size", 4, "train")
