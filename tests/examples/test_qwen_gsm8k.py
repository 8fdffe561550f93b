"""The example examples/qwen_gsm8k: its commands compose, and its table says what its results say."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from strop.config.compose import load
from strop.config.derived import has_critic

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "qwen_gsm8k"
README = (EXAMPLE / "README.md").read_text()


def commands() -> list[list[str]]:
    lines = README.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[2:] for line in lines if line.strip().startswith("strop ppo")]


@pytest.mark.parametrize("arguments", commands(), ids=["grpo", "rloo", "lora", "grpo_1.5b"])
def test_commands_compose(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load("ppo_trainer", arguments[1:], arguments[0]).config
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 1024
    assert config.trainer.total_training_steps == (100 if "1.5b" in arguments[0] else 300)


def module(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_every_algorithm_has_the_same_samples_and_its_own_folder():
    algorithms = module("algorithms")
    folders = set()
    for name in algorithms.ALGORITHMS:
        config = algorithms.config_of([name, "trainer.total_training_steps=7"]).config
        assert config.trainer.total_training_steps == 7
        prompts = config.data.gen_batch_size or config.data.train_batch_size
        assert prompts * config.actor_rollout_ref.rollout.n == 1024
        assert has_critic(config) == (name == "ppo")
        folders.add(config.trainer.default_local_dir)
    assert len(folders) == len(algorithms.ALGORITHMS)


SECTIONS = {"Results with the 0.5B": ["grpo", "rloo", "lora"], "Results with the 1.5B": ["grpo_1.5b"]}


@pytest.mark.parametrize("title", SECTIONS)
def test_the_table_is_that_of_the_results(title):
    plot = module("plot")
    table = {}
    section = README.partition(f"## {title}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0].isdigit():
            table[float(cells[0])] = [cell.strip("*") for cell in cells[1:]]
    for column, name in enumerate(SECTIONS[title]):
        measured = {step: f"{value:.1f}%" for step, value in plot.accuracy(EXAMPLE / f"results/{name}.jsonl")}
        assert measured == {step: cells[column] for step, cells in table.items() if cells[column]}


def test_sampling_and_training_agreed_in_every_step():
    for name, steps in (("grpo", 93), ("rloo", 73), ("grpo_1.5b", 46)):
        rows = [json.loads(line) for line in (EXAMPLE / f"results/{name}.jsonl").read_text().splitlines()]
        differences = [row["data"]["training/rollout_logprobs_diff_max"] for row in rows[1:]]
        assert len(differences) == steps and max(differences) < 2e-6
