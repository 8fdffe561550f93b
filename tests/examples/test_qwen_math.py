"""The example examples/qwen_math: answers are found again from the texts by other means, equal values score and
others do not, held-out problems are not trained on."""

from __future__ import annotations

import itertools
import random
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from strop.catalog import SCORERS
from strop.config.compose import load
from strop.registry import load_module

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "qwen_math"
MODULES = ("problem", "algebra", "integers", "geometry", "prepare")


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
def score():
    module = load_module(str(EXAMPLE / "reward.py"))  # as a run loads it
    yield module.score
    sys.modules.pop(module.__name__)
    SCORERS._entries.pop("generated_math")


@pytest.fixture(scope="module")
def files(prepare):
    return prepare.problems(1500, 200)


def test_held_out_families_and_texts_are_not_trained_on(files):
    families = {name: {row["extra_info"]["family"] for row in rows} for name, rows in files.items()}
    assert {name: len(rows) for name, rows in files.items()} == {
        "test_instances": 200,
        "test_families": 200,
        "train": 1500,
    }
    assert len(families["train"]) == 22 and families["test_instances"] <= families["train"]
    assert len(families["test_families"]) == 7 and not families["train"] & families["test_families"]
    assert len({row["extra_info"]["subject"] for row in files["test_families"]}) == 7
    texts = [row["prompt"][0]["content"] for rows in files.values() for row in rows]
    assert len(set(texts)) == len(texts) == 1900


def test_the_same_seed_makes_the_same_problems(prepare):
    assert prepare.problems(60, 20, seed=3) == prepare.problems(60, 20, seed=3)
    assert prepare.problems(60, 20, seed=3) != prepare.problems(60, 20, seed=4)
    few = prepare.rows_of(["polygon_angle"], 100, "generated_math/train", 0, set())
    with pytest.raises(ValueError, match=r"Only 24 different problems of 100 .* 1 families. Ask for fewer"):
        list(few)


def value(answer: str) -> Fraction:
    found = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", answer)
    if found:
        return Fraction(int(f"{found[1]}{found[2]}"), int(found[3]))
    return Fraction(answer)


def evaluate(polynomial: str, x: Fraction) -> Fraction:
    """`2x^2 - x + 5` at x, read from its text."""
    total = Fraction(0)
    for sign, size, variable, power in re.findall(r"([+-]?)\s*(\d*)(x?)(?:\^(\d+))?", polynomial):
        if size or variable:
            coefficient = int(size or 1) * (-1 if sign == "-" else 1)
            total += coefficient * x ** (int(power or 1) if variable else 0)
    return total


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"-?\d+", text)]


def check_linear(text: str, answer: Fraction) -> None:
    left, right = re.search(r": \$(.*) = (.*)\$", text).groups()
    assert evaluate(left, answer) == evaluate(right, answer)


def check_root(text: str, answer: Fraction) -> None:
    equation = re.search(r"\$(.*) = 0\$", text)[1]
    assert evaluate(equation, answer) == 0
    assert all(evaluate(equation, Fraction(x)) != 0 for x in range(int(answer) + 1, 40))


def check_least(text: str, answer: Fraction) -> None:
    polynomial = re.search(r"\$(.*)\$ over", text)[1]
    values = [evaluate(polynomial, Fraction(k, 20)) for k in range(-300, 301)]
    assert answer <= min(values) < answer + 1


def check_remainder(text: str, answer: Fraction) -> None:
    polynomial, root = re.search(r"when \$(.*)\$ is divided by \$x ([+-] \d+)\$", text).groups()
    assert evaluate(polynomial, -Fraction(root.replace(" ", ""))) == answer


def check_power(text: str, answer: Fraction) -> None:
    base, power, modulus = numbers(text)
    rest = 1
    for _ in range(power):
        rest = rest * base % modulus
    assert rest == answer


def check_divisors(text: str, answer: Fraction) -> None:
    (number,) = numbers(text)
    step = 2 if "odd" in text else 1
    assert sum(number % k == 0 for k in range(1, number + 1, step)) == answer


def check_bases(text: str, answer: Fraction) -> None:
    terms = re.findall(r"(\d+)_\{(\d)\}", text)
    assert sum(int(digits, int(base)) for digits, base in terms) == answer


def check_remainders(text: str, answer: Fraction) -> None:
    a, m, b, n = numbers(text)
    fits = [k for k in range(1, 2 * m * n) if k % m == a and k % n == b]
    assert fits[0] == answer


def check_dice(text: str, answer: Fraction) -> None:
    sides, _, _, least = numbers(text.replace("-sided", ""))
    rolls = list(itertools.product(range(1, sides + 1), repeat=2))
    assert Fraction(sum(sum(roll) >= least for roll in rolls), len(rolls)) == answer


def check_committee(text: str, answer: Fraction) -> None:
    women, men, size, least = numbers(text)
    people = [1] * women + [0] * men
    assert sum(sum(chosen) >= least for chosen in itertools.combinations(people, size)) == answer


def check_arrangements(text: str, answer: Fraction) -> None:
    word = re.search(r"the word ([A-Z]+)", text)[1]
    if len(word) > 7:
        return
    rows = set(itertools.permutations(word))
    if text.startswith("How many"):
        assert len(rows) == answer
        return
    first = re.search(r"first letter is ([A-Z])", text)[1]
    last = "last" in text
    hits = sum(row[0] == first and (not last or row[-1] == first) for row in rows)
    assert Fraction(hits, len(rows)) == answer


def check_paths(text: str, answer: Fraction) -> None:
    _, _, right, up, x, y = numbers(text)[:6]

    def ways(a: int, b: int) -> int:
        return 1 if not a or not b else ways(a - 1, b) + ways(a, b - 1)

    assert ways(x, y) * ways(right - x, up - y) == answer


def check_sum(text: str, answer: Fraction) -> None:
    count, first, second = numbers(text)[:3]
    assert sum(first + k * (second - first) for k in range(count)) == answer


CHECKS = {
    "linear_equation": check_linear,
    "larger_root": check_root,
    "least_value": check_least,
    "remainder": check_remainder,
    "last_digits": check_power,
    "divisors": check_divisors,
    "in_base": check_bases,
    "two_remainders": check_remainders,
    "dice_sum": check_dice,
    "committee": check_committee,
    "arrangements": check_arrangements,
    "grid_paths": check_paths,
    "arithmetic_sum": check_sum,
}


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_answers_are_found_again_from_the_text(name, prepare):
    family = prepare.FAMILIES[name][2]
    draw = random.Random(11)
    for _ in range(40):
        problem = family(draw)
        CHECKS[name](problem.text, value(problem.answer))


def test_equal_values_score_and_others_do_not(files, score):
    for row in [row for rows in files.values() for row in rows][::7]:
        truth = row["reward_model"]["ground_truth"]
        assert score(f"So the answer is $\\boxed{{{truth}}}$.", truth) == 1.0
        assert score(f"So the answer is $\\boxed{{{truth} + 1}}$.", truth) == 0.0
        assert score(f"The answer is {truth}.", truth) == 0.0
    assert score("\\boxed{0.75}", "\\frac{3}{4}") == score("\\boxed{\\sqrt{12}}", "2\\sqrt{3}") == 1.0


def test_the_configuration_composes(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load("ppo_trainer", [], "examples/qwen_math/grpo.yaml").config
    assert config.plugins == ["examples/qwen_math/reward.py"]
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 512
