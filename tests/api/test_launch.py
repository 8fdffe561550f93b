"""How runs from Python end: by Ctrl-C, by `stop`, by an error of a callback; and what is refused at the start."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import strop
from strop.api import launch
from strop.catalog import ADVANTAGES
from strop.config.compose import load
from strop.registry import load_attribute, load_module
from strop.run.atomic_files import to_json
from strop.run.checkpoint.layout import read_latest
from tests.api.scene import digits, small
from tests.runtime.started import assert_same_run

Call = Callable[..., strop.Run[Any]]


@pytest.fixture
def call(task: Path, tmp_path: Path) -> Call:
    """A run of two steps in a folder of its own."""
    return lambda **more: strop.grpo(**small(task, tmp_path / "run", {"reward": digits, **more}))  # type: ignore[arg-type]


def test_a_call_after_ctrl_c_goes_on(call: Call, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"step 1 of 2.*The same call continues"):
        call(on_step=lambda step, metrics: os.kill(os.getpid(), signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is handler
    assert read_latest(tmp_path / "run") == 1
    run = call()
    assert run.finished and run.metrics["step"] == [1, 2] and [row["step"] for row in run.rows] == [2]
    whole = call(folder=str(tmp_path / "whole"))
    assert_same_run(whole.folder, run.folder, steps=2)
    assert torch.equal(torch.rand(3), expected)  # the caller's random numbers are not touched


def test_in_a_notebook_ctrl_c_returns_the_run(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_interactive", lambda: True)
    run = call(on_step=lambda step, metrics: os.kill(os.getpid(), signal.SIGINT))
    assert not run.finished and run.step == 1 and run.metrics["step"] == [1]
    assert run.model.config.model_type == "llama"


def test_stop_and_samples(call: Call, tmp_path: Path) -> None:
    seen: list[tuple[int, int, object]] = []

    def on_samples(step: int, samples: Any) -> None:
        seen.append((step, len(samples), samples[0]["split"]))

    run = call(on_samples=on_samples, stop=lambda step, metrics: metrics["critic/score/mean"] >= 0)
    assert run.step == 1 and not run.finished and read_latest(tmp_path / "run") == 1
    assert seen == [(1, 8, "train")]


def test_an_error_of_a_callback_ends_the_run_in_order(call: Call, tmp_path: Path) -> None:
    """Here the callback starts a second run, which is refused."""
    with pytest.raises(ValueError, match=r"Another run of this process has not ended") as raised:
        call(on_step=lambda step, metrics: call(folder=str(tmp_path / "second")))
    assert "has ended in order after this error of a callback" in raised.value.__notes__[0]
    assert read_latest(tmp_path / "run") == 1 and not (tmp_path / "second" / "metrics.jsonl").exists()


def test_a_reward_that_breaks_in_the_middle_loses_nothing(call: Call, tmp_path: Path) -> None:
    """The finished step is saved, libraries are as before, and a corrected function goes on."""
    from strop.models.patches import _records

    asked: list[str] = []

    def breaks(completion: str) -> float:
        asked.append(completion)
        if len(asked) > 9:  # one in the preflight, eight in the first step
            raise OSError("the disk is gone")
        return float(len(completion))

    with pytest.raises(ValueError, match=r"the disk is gone"):
        call(reward=breaks, retries=0)
    assert read_latest(tmp_path / "run") == 1
    assert not [record for record in _records.values() if record.applied]
    assert call(reward=lambda completion: float(len(completion))).metrics["step"] == [1, 2]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completion: None, "The function returned None; did it forget `return`"),
        (lambda completion: float("nan"), "returned nan, which is not a finite number"),
        (lambda completion: {"points": 1}, "a dict without 'score', only points"),
        (lambda completion: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda completions: [1.0, 2.0], "called with 1 samples and returned 2 values"),
        (lambda completions: 1.0, "called with 1 samples and returned a float"),
        ([digits, lambda completion: None, lambda completion: "a"], "returned 'a' of type str"),
        (
            lambda text: 0.0,
            r"\(text\): its parameters do not say how to call it. Name one of them completion",
        ),
        (lambda completion, solution_str: 0.0, "different forms of a reward function"),
        (lambda completion, level: 0.0, "asks for 'level', but train has no such column.*answer, prompt"),
        (lambda solution_str, ground_truth: 0.0, "asks for ground_truth, but train has none"),
        ("correct", "reward is 'correct', which cannot be called"),
        (None, "Give reward="),
    ],
)
def test_rewards_that_are_refused_before_the_run(
    reward: Any, message: str, call: Call, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        call(reward=reward)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"train": [{"question": "a"}]}, "train has no column 'prompt'.*Its columns: question"),
        ({"max_respons_length": 3}, "no such key. Did you mean data.max_response_length"),
        ({"data.train_files": "x.parquet"}, "train sets data.train_files, which is also given as a key"),
        ({"reward_weights": [1.0, 2.0]}, "1 reward functions and 2 weights"),
        ({"model": 3}, "model is a builtins.int; it must be a name"),
        ({"n_gpus_per_node": 2, "stop": print}, "n_gpus_per_node=2 the run is in processes of its own"),
        ({"n_gpus_per_node": 2, "reward": lambda completion: 0}, "exists in this process only: it is"),
        ({"max_restarts": 1, "on_step": print}, "With trainer.max_restarts=1 the run is in processes"),
        ({"global_profiler.tool": "nsys"}, "nsys starts the process again"),
    ],
)
def test_arguments_that_are_refused(more: dict[str, Any], message: str, call: Call) -> None:
    with pytest.raises(ValueError, match=message):
        call(**more)


def test_a_function_without_a_source_has_no_command_line(call: Call) -> None:
    weight = 0.5

    def closure(completion: str) -> float:
        return weight * len(completion)

    run = call(reward=closure, steps=1)
    with pytest.raises(ValueError, match=r"same: closure.*uses weight of it.*at the top level of a file"):
        run.command()


def test_an_estimator_of_a_notebook_has_no_command_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command with its name would start a process that does not know it."""

    def halved(rewards: Tensor, mask: Tensor) -> Tensor:
        return rewards * mask / 2

    halved.__module__ = "__main__"
    monkeypatch.setattr(ADVANTAGES, "_entries", dict(ADVANTAGES._entries))
    ADVANTAGES.register("halved")(halved)
    run = call(steps=1, adv_estimator="halved")
    with pytest.raises(ValueError, match=r"advantage estimator halved exists in this.*plugins="):
        run.command()


@pytest.mark.slow
def test_two_ranks(call: Call) -> None:
    run = call(n_gpus_per_node=2, **{"checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"]})
    assert run.finished and run.metrics["step"] == [1, 2] and len(run.samples()) == 8
    assert run.model.config.model_type == "llama" and run.tokenizer.eos_token


def test_a_validation_that_was_repeated_belongs_to_its_step(tmp_path: Path) -> None:
    lines = ['{"step": 1, "data": {"train/loss": 2.0}}', '{"step": 1, "data": {"val/loss": 3.0}}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    config = load("sft_trainer").config
    run = strop.Run(config, "sft", [], tmp_path, step=1, total_steps=1)
    assert list(run.metrics) == [{"step": 1, "train/loss": 2.0, "val/loss": 3.0}]


def test_metrics_that_are_no_finite_numbers_are_numbers_all_the_same(tmp_path: Path) -> None:
    """The file holds them as texts, because JSON has no NaN. A name may hold any line break but its own."""
    name = "val-core/a\u2028b/acc"
    lines = [to_json({"step": 1, "data": {"actor/grad_norm": math.inf, "actor/ppo_kl": math.nan, name: 0.5}})]
    lines.append('{"step": 2, "data": {"actor/grad_norm": 0.25, "actor/ppo_kl": -1e999}}\n{"step": 3, "da')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = strop.Run(load("sft_trainer").config, "sft", [], tmp_path, step=2, total_steps=2)
    assert run.metrics["actor/grad_norm"] == [math.inf, 0.25] and run.metrics[name] == [0.5, None]
    assert str(run.metrics["actor/ppo_kl"]) == "[nan, -inf]"
    assert run.plot("actor/grad_norm", "actor/ppo_kl").path.stat().st_size


def test_a_file_that_was_edited_between_two_calls_is_read_again(tmp_path: Path, monkeypatch) -> None:
    """Also if it was edited within a second and is as long as before, where Python would take its bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "reward.py"
    words = [f"plugins=[{file}]"]
    for text in ("10", "200", "300", "300"):
        file.write_text(f"def score(completion):\n    return {text}\n")
        before = load_module(str(file))
        launch.draft_config("sft_trainer", words)
        assert load_attribute(str(file), "score")("") == int(text)
    assert load_module(str(file)) is before  # it has not changed


def test_a_module_that_a_file_imports_is_read_again_when_it_was_edited(tmp_path: Path, monkeypatch) -> None:
    """Also by a second file, which found it imported, and where it is imported through its package."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "my_scores"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "one.py").write_text("import my_scores.points\nscore = my_scores.points.value\n")
    (tmp_path / "two.py").write_text("from my_scores import points\nscore = points.value\n")
    words = [f"plugins=[{tmp_path}/one.py, {tmp_path}/two.py, pkg://my_scores.points]"]
    for value in (1, 2, 33, 33):
        (package / "points.py").write_text(f"def value():\n    return {value}\n")
        before = load_module(f"{tmp_path}/two.py")
        launch.draft_config("sft_trainer", words)
        for place in (f"{tmp_path}/one.py", f"{tmp_path}/two.py"):
            assert load_attribute(place, "score")() == value
        assert load_attribute("pkg://my_scores.points", "value")() == value
    assert load_module(f"{tmp_path}/two.py") is before  # nothing has changed


def test_a_module_is_read_again_although_the_file_that_imported_it_had_failed(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_limits.py").write_text("")
    (tmp_path / "fails.py").write_text("from my_limits import LIMIT\n")
    with pytest.raises(ValueError, match="cannot import name 'LIMIT'"):
        load_module(f"{tmp_path}/fails.py")
    (tmp_path / "my_limits.py").write_text("LIMIT = 3\n")
    launch.draft_config("sft_trainer", [])
    assert load_attribute(f"{tmp_path}/fails.py", "LIMIT") == 3


def test_libraries_are_not_imported_again(tmp_path: Path, monkeypatch) -> None:
    """A second copy of a library would have other classes than the first."""
    (tmp_path / "uses.py").write_text("import this, strop.run.chart\n")
    for name in ("this", "strop.run.chart"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    load_module(f"{tmp_path}/uses.py")
    kept = [sys.modules["this"], sys.modules["strop.run.chart"]]
    (tmp_path / "uses.py").write_text("import this, strop.run.chart\nedited = True\n")
    launch.draft_config("sft_trainer", [])
    assert load_attribute(f"{tmp_path}/uses.py", "edited")
    assert [sys.modules["this"], sys.modules["strop.run.chart"]] == kept
