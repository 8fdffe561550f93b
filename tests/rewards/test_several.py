"""Several reward functions as one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from strop.rewards.base import RewardSample
from strop.rewards.function import RewardFunction
from strop.rewards.several import Several, load_several
from tests.rewards.test_signatures import sample

SAMPLES = [sample("4"), sample("5")]
GATE = threading.Event()


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


async def slow(completion: str, **row: object) -> float:
    return 0.5


def trl(completions: list[str], **columns: object) -> list[float | None]:
    return [None, *(2.0 for _ in completions[1:])]


def compute_score(solution_str: str, ground_truth: str) -> dict[str, float]:
    return {"score": float(len(ground_truth))}


def test_scores_of_every_form_are_weighted_and_added() -> None:
    several = Several([right, slow, trl, compute_score], [1, 2, 3, 0.5])
    function = RewardFunction(several, takes_lists=True)
    assert function.call_with_lists(SAMPLES) == [
        {"score": 1 + 2 * 0.5 + 0.5 * 4, "right": 1.0, "slow": 0.5, "compute_score": 4.0},
        {"score": 2 * 0.5 + 3 * 2 + 0.5 * 4, "right": 0.0, "slow": 0.5, "trl": 2.0, "compute_score": 4.0},
    ]
    function.close()


def first(samples: list[RewardSample], *functions: object) -> object:
    return Several(functions)(samples)[0]  # type: ignore[arg-type]


def test_what_one_of_them_does_wrong_is_the_error_of_the_sample() -> None:
    def fails(completion: str) -> float:
        raise KeyError("lost")

    assert isinstance(first(SAMPLES, right, fails), KeyError)
    assert "right_2: The scorer returned nan" in str(first(SAMPLES, right, nan_named_right()))
    assert "None of trl gave a score" in str(first(SAMPLES, trl))
    with pytest.raises(ValueError, match=r"called with 2 samples and returned 1 values"):
        first(SAMPLES, lambda completions: [1.0])
    with pytest.raises(ValueError, match=r"called with 2 samples and returned a float"):
        first(SAMPLES, lambda completions: 1.0)


def nan_named_right() -> object:
    def right(completion: str) -> float:
        return float("nan")

    return right


def test_weights_belong_to_functions() -> None:
    with pytest.raises(ValueError, match=r"2 reward functions and 1 weights"):
        Several([right, slow], [1.0])
    with pytest.raises(ValueError, match=r"no reward function"):
        Several([])


def test_they_are_loaded_from_files() -> None:
    loaded = load_several([("pkg://tests.rewards.test_several", "right")], [2.0])
    assert loaded(SAMPLES)[0] == {"score": 2.0, "right": 1.0}


async def hanging(completion: str, **row: object) -> float:
    if completion == "5":
        await asyncio.sleep(1000)
    return 1.0


def blocking(completion: str, **row: object) -> float:
    if completion == "5":
        GATE.wait(1000)
    return 1.0


@pytest.mark.parametrize("function", [hanging, blocking])
def test_a_sample_that_takes_too_long_fails_alone(function: Callable[..., object]) -> None:
    GATE.clear()
    scoring = RewardFunction(Several([function, right]), takes_lists=True, timeout=0.5)
    try:
        [scored, late] = scoring.call_with_lists(SAMPLES)
    finally:
        GATE.set()
        scoring.close()
    assert scored == {"score": 1.0 + right("4", "4"), function.__name__: 1.0, "right": 1.0}
    assert isinstance(late, TimeoutError)
