"""docs/recipes.md: every command composes and passes the rules between keys; the RL recipes run for one step."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from strop.cli import PROGRAMS, VERBS
from strop.config.commandline import parse
from strop.config.compose import load
from strop.config.rules import check

ROOT = Path(__file__).parents[2]
BASE = "examples/recipes/base.yaml"
TINY = {
    "data.train_batch_size": "8",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
    "data.max_prompt_length": "8",
    "data.max_response_length": "4",
    "reward_model.overlong_buffer.len": "2",
    "trainer.total_training_steps": "1",
    "trainer.test_freq": "-1",
    "trainer.save_freq": "-1",
    "trainer.val_before_train": "false",
    "trainer.logger": "file",
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
}
RUNS = {"grpo", "dapo", "dr_grpo", "gspo", "reinforce_plus_plus", "rloo", "lora", "async", "distillation"}
"""Recipes that need no other model, tool or machine."""


def commands() -> list[tuple[str, list[str]]]:
    """Verb and words of every command of the page that takes keys."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    found = []
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[0] == "strop":
                found.append((words[1], words[2:]))
    return found


def name_of(words: list[str]) -> str:
    for word in words:
        if word.startswith("trainer.experiment_name="):
            return word.partition("=")[2]
    return words[0]


COMMANDS = commands()


def test_every_recipe_has_a_command() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    parts = text.split("\n## ")[1:-1]
    assert [part.partition("\n")[0] for part in parts if "\nstrop" not in part] == []
    assert {name_of(words) for _, words in COMMANDS} >= RUNS and len(COMMANDS) >= 15


@pytest.mark.parametrize(("verb", "words"), COMMANDS, ids=[name_of(words) for _, words in COMMANDS])
def test_a_recipe_composes_and_passes_every_rule(
    verb: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = parse(words)
    loaded = load(VERBS[verb], arguments.overrides, arguments.config, arguments.search)
    findings = check(loaded)
    assert [finding for finding in findings if finding.level == "error"] == []
    assert loaded.notices == []


def tiny_words(words: list[str], task: Path, folder: Path) -> list[str]:
    """The same recipe with a tiny model, its data and small sizes."""
    values = dict(TINY)
    values["data.train_files"] = f"{task}/data/train.parquet"
    values["data.val_files"] = f"{task}/data/test.parquet"
    values["actor_rollout_ref.model.path"] = f"{task}/model"
    if any(word.startswith("algorithm.distillation.path=") for word in words):
        values["algorithm.distillation.path"] = f"{task}/model"
    values["trainer.default_local_dir"] = str(folder)
    kept = [word for word in words if word.partition("=")[0] not in values]
    return [*kept, *(f"{key}={value}" for key, value in values.items())]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_recipe_runs_one_step(
    name: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    [words] = [words for _, words in COMMANDS if name_of(words) == name]
    assert PROGRAMS["ppo"](tiny_words(words, task, tmp_path)) == 0
    assert '"step": 1' in (tmp_path / "metrics.jsonl").read_text()
