"""The example examples/qwen_code: references pass their own hidden tests, wrong programs do not, attempts to cheat are
counted and earn nothing, held-out tasks are not trained on."""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.catalog import SCORERS
from strop.config.compose import load
from strop.config.schema.reward import SandboxFusionConfig
from strop.registry import load_module
from strop.rewards.function import RuleScorer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "qwen_code"
MODULES = ("task", "strings", "arithmetic", "lists", "dictionaries", "prepare")


@pytest.fixture(scope="module")
def prepare():
    """The script, with its neighbours importable as when it is run; they are forgotten afterwards."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import prepare

        yield prepare
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def reward():
    module = load_module(str(EXAMPLE / "reward.py"))  # as a run loads it
    yield module
    sys.modules.pop(module.__name__)
    SCORERS._entries.pop("generated_code")


@pytest.fixture(scope="module")
def files(prepare):
    return prepare.tasks(1200, 100)


def test_sizes_families_and_no_task_twice(files, prepare):
    families = {name: {row["extra_info"]["family"] for row in rows} for name, rows in files.items()}
    assert {name: len(rows) for name, rows in files.items()} == {
        "test_instances": 100,
        "test_families": 100,
        "train": 1200,
    }
    assert not families["train"] & families["test_families"]
    assert families["test_instances"] <= {
        n for n, (_, held_out, _) in prepare.FAMILIES.items() if not held_out
    }
    assert {row["extra_info"]["topic"] for row in files["test_families"]} == {
        "strings",
        "numbers",
        "lists",
        "dictionaries",
    }
    sentences = [row["prompt"][0]["content"].partition("\n\n")[0] for rows in files.values() for row in rows]
    assert len(set(sentences)) == len(sentences) == 1400


def test_the_same_seed_makes_the_same_tasks(prepare):
    assert prepare.tasks(40, 11, seed=3) == prepare.tasks(40, 11, seed=3)
    assert prepare.tasks(40, 11, seed=3) != prepare.tasks(40, 11, seed=4)


def test_no_constant_solves_a_task_and_the_example_is_no_test(files):
    for rows in files.values():
        for row in rows:
            truth = json.loads(row["reward_model"]["ground_truth"])
            values = [json.dumps(value) for value in truth["outputs"]]
            assert len(values) == 10 and max(map(values.count, values)) <= 5, truth
            assert truth["shown"][0] not in truth["inputs"]


def test_references_compute_what_their_texts_say(prepare):
    """Values by hand, for rules that are easy to get wrong."""
    draw = random.Random(5)

    def task(name):
        return prepare.build(name, draw, twisted=0.0)

    coins = task("count_coins")
    amounts = [int(word.strip(",")) for word in coins.text.split("coins of ")[1].split(" always")[0].split()]
    assert sum(n * coin for n, coin in zip(coins.call([137]), amounts)) == 137
    assert task("merge_intervals").call([[[10, 12], [0, 1], [11, 20]]]) == [[0, 1], [10, 20]]
    assert task("bracket_depth").call(["x"]) == 0
    assert task("zigzag").call([[]]) == []
    assert task("add_minutes").call(["00:00", 24 * 60 * 2]) == "00:00"
    assert task("interleave").call(["ab", "xyz"])[-1] == "z"
    unit = task("round_to")
    assert abs(unit.call([7]) - 7) <= 13


def program_of(task) -> str:
    """A program made of the reference's own source, with the parameters that it closes over."""
    source = textwrap.dedent(inspect.getsource(task.solve))
    values = inspect.getclosurevars(task.solve).nonlocals
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    renamed = source.replace("def solve(", f"def {task.function}(", 1)
    return "\n".join([*lines, renamed])


def scored(prepare, reward, name: str, program_for) -> dict:
    draw = random.Random(11)
    row = None
    while row is None:
        task = prepare.build(name, draw, twisted=0.0)
        row = prepare.to_row(task, draw, "generated_code/train", 0)
    truth = row["reward_model"]["ground_truth"]
    return reward.score(f"Here it is.\n```python\n{program_for(task, json.loads(truth))}\n```", truth)


@pytest.mark.parametrize("name", ["drop_near", "zigzag", "rotate_vowels"])
def test_a_right_program_passes_and_counts_no_attempt(name, prepare, reward):
    def program(task, truth):
        return "VOWELS = 'aeiou'\n" + program_of(task)

    result = scored(prepare, reward, name, program)
    assert result["score"] == result["acc"] == 1.0 and result["verdict"] == "passed"
    assert result["cheat_any"] == 0.0


ATTEMPTS = {
    "cheat_exit": "import sys\ndef drop_near(values):\n    sys.exit(0)",
    "cheat_files": "def drop_near(values):\n    return eval(open('/proc/self/cmdline').read())",
    "cheat_patch": (
        "class Same(list):\n    def __eq__(self, other):\n        return True\n"
        "def drop_near(values):\n    return Same()"
    ),
    "cheat_constants": "def drop_near(values):\n    if values == {arguments}:\n        return {value}\n    return []",
}


@pytest.mark.parametrize("kind", sorted(ATTEMPTS))
def test_an_attempt_is_counted_and_earns_nothing(kind, prepare, reward):
    def program(task, truth):
        (arguments,), value = truth["shown"]
        return ATTEMPTS[kind].replace("{arguments}", repr(arguments)).replace("{value}", repr(value))

    result = scored(prepare, reward, "drop_near", program)
    assert result["score"] == 0.0
    kinds = [name for name in ATTEMPTS if result[name] == 1.0]
    assert kinds == [kind] and result["cheat_any"] == 1.0 and result["cheat_rewarded"] == 0.0


def test_equal_programs_and_programs_that_do_not_parse_need_no_second_sandbox(prepare, reward, monkeypatch):
    ran = []

    def counted(answer, truth, **settings):
        ran.append(answer)
        return {"score": 1.0, "acc": 1.0, "verdict": "passed"}

    monkeypatch.setattr(reward, "compute_score", counted)
    monkeypatch.setattr(reward, "_RESULTS", {})
    programs = [
        "def f(x):\n    return x",
        "def f(x):\n    return x",
        "def f(x) return x",
        "def f(y):\n    return y",
    ]
    scores = [reward.score(f"```python\n{text}\n```", "{}")["score"] for text in programs]
    assert scores == [1.0, 1.0, 0.0, 1.0] and len(ran) == 2
    assert reward.score("I do not know.", "{}")["no_program"] == 1.0 and len(ran) == 2


def test_a_machine_without_isolation_shows_with_any_response(reward):
    with pytest.raises(ValueError, match="Unknown isolation 'moat'"):
        reward.score("I do not know.", "{}", sandbox=SandboxFusionConfig(isolation="moat"))


def test_the_configuration_composes_and_scores_in_parallel(monkeypatch, reward):
    monkeypatch.chdir(ROOT)
    config = load("ppo_trainer", [], "examples/qwen_code/grpo.yaml").config
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 512
    sample = SimpleNamespace(data_source="generated_code/train")
    assert RuleScorer().concurrency([sample]) == os.cpu_count()
