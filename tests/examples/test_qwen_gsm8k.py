"""The example examples/qwen_gsm8k: its commands compose, and its table says what its results say."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from statistics import median

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


def rows_of(name: str) -> list[dict[str, float]]:
    lines = (EXAMPLE / f"results/algorithms/{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines]


def test_the_table_of_algorithms_is_that_of_the_results():
    alone = {
        "grpo_seed1": (2, 8),
        "ppo": (2, 13),
        "lora": (6, 12),
        "one_step_off": (9, 12),
        "async_partial": (6, 12),
    }
    section = README.partition("## Algorithms at the same number of samples\n")[2].partition("\n## ")[0]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "%" in line]
    table = [cells for cells in table if len(cells) == 7]
    assert len(table) == 10
    for name, *cells in table:
        rows = rows_of(name)
        found = []
        for step, samples in ((5, 1), (10, 1), (15, 1), (15, 8)):
            accuracy = (
                rows[step - 1].get(f"val-core/openai/gsm8k/reward/mean@{samples}")
                if step <= len(rows)
                else None
            )
            found.append("" if accuracy is None else f"{100 * accuracy:.1f}%")
        first, last = alone.get(name, (0, -1))
        seconds = [row["timing_s/step"] for row in rows[first - 1 : last]] if name in alone else []
        found.append(f"{median(seconds):.1f}" if seconds else "")
        found.append(f"{max(row['perf/max_memory_allocated_gb'] for row in rows):.0f}")
        assert cells == found, name


def test_dapo_has_the_accuracies_of_its_rounds():
    rounds, found = 0.0, {}
    for row in rows_of("dapo"):
        rounds += row["train/num_gen_batches"]
        if "val-core/openai/gsm8k/acc/mean@1" in row:
            found[rounds] = f"{100 * row['val-core/openai/gsm8k/acc/mean@1']:.1f}%"
    assert (found[14], found[16], found[25]) == ("21.8%", "25.9%", "29.0%")


def test_sampling_and_training_agreed_in_every_step():
    synchronous = (
        "grpo_seed1",
        "grpo_seed2",
        "grpo_seed3",
        "ppo",
        "rloo",
        "reinforce_plus_plus",
        "gspo",
        "lora",
        "dapo",
    )
    for name in synchronous:
        assert max(row["training/rollout_logprobs_diff_max"] for row in rows_of(name)) < 2e-6, name
    for name, steps in (("grpo", 93), ("rloo", 73), ("grpo_1.5b", 46)):
        rows = [json.loads(line) for line in (EXAMPLE / f"results/{name}.jsonl").read_text().splitlines()]
        differences = [row["data"]["training/rollout_logprobs_diff_max"] for row in rows[1:]]
        assert len(differences) == steps and max(differences) < 2e-6
