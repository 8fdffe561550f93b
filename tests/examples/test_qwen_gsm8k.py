"""The example examples/qwen_gsm8k: its commands compose, and its table says what its results say."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shlex
import sys
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
    sys.modules[spec.name] = found  # where dataclasses look for it
    try:
        spec.loader.exec_module(found)
    finally:
        del sys.modules[spec.name]
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
    assert len(table) == 12
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
        "lora_5e-5",
        "dapo",
    )
    for name in synchronous:
        assert max(row["training/rollout_logprobs_diff_max"] for row in rows_of(name)) < 2e-6, name
    for name, steps in (("grpo", 93), ("rloo", 73), ("grpo_1.5b", 46)):
        rows = [json.loads(line) for line in (EXAMPLE / f"results/{name}.jsonl").read_text().splitlines()]
        differences = [row["data"]["training/rollout_logprobs_diff_max"] for row in rows[1:]]
        assert len(differences) == steps and max(differences) < 2e-6


CLIPS = (
    "Ann sold 48 clips in April 2021, and then she sold half as many in May. How many did she sell in 2 months?",
    "In May: 48/2 = <<48/2=24>>24.\nIn all: 48+24 = <<48+24=72>>72.\n#### 72",
    lambda clips: clips / 2 + clips,
)
SALE = (
    "A $1,500 bike is 20% off. Bo pays with 3 gifts of $150 each, and $24 of cash. How much more does he need?",
    "<<20/100*1500=300>> <<1500-300=1200>> <<150*3=450>> <<1200-(450+24)=726>>\n#### 726",
    lambda price, gifts, gift, cash: price * 0.8 - (gifts * gift + cash),
)
PAGES = (
    "Of 120 pages Di read 12 on Monday and 24 on Tuesday. If she reads half of the rest, how many are that?",
    "<<12+24=36>>36 and <<120-36=84>>84, so <<84/2=42>>42.\n#### 42",
    lambda pages, monday, tuesday: (pages - monday - tuesday) / 2,
)


@pytest.mark.parametrize(
    ("question", "answer", "formula"), [CLIPS, SALE, PAGES], ids=["clips", "sale", "pages"]
)
def test_other_numbers_have_their_own_answer(question, answer, formula):
    vary = module("vary")
    problem = vary.read(question, answer)
    pattern = re.compile("([0-9,]+)".join(map(re.escape, problem.text)))
    draw = random.Random(1)
    made = {vary.vary(problem, draw) for _ in range(40)}
    assert len(made) > 12 and None not in made
    for text, found in made:
        numbers = [int(number.replace(",", "")) for number in pattern.fullmatch(text).groups()]
        assert int(found) == formula(*numbers) > 0 and text != question


def test_years_percents_and_counts_in_words_stay():
    vary = module("vary")
    problems = [vary.read(question, answer) for question, answer, _ in (CLIPS, SALE)]
    assert [list(map(int, problem.amounts)) for problem in problems] == [[48], [1500, 3, 150, 24]]
    text, _ = vary.vary(problems[0], random.Random(0))
    assert text.endswith("in 2 months?") and "2021" in text


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("He has 6 cows and buys 4. She has 10. How many are there?", "<<6+4=10>> <<10+10=20>>\n#### 20"),
        ("He has 6 cows and buys 4. How many are there?", "<<6+4=11>>\n#### 11"),
        ("He has 6 cows and buys 4. How many are there?", "<<6+4=10>>\n#### 12"),
        ("He has 6 cows and buys 4. How many are there?", "There are ten.\n#### 10"),
        ("He has six cows and buys four. How many are there?", "<<6+4=10>>\n#### 10"),
        ("He has 6 cows and buys 4. How many are there?", "<<6 plus 4=10>>\n#### 10"),
    ],
    ids=["result or amount", "wrong", "other answer", "no calculation", "words", "no signs"],
)
def test_questions_that_cannot_be_followed_are_left_out(question, answer):
    assert module("vary").read(question, answer) is None
