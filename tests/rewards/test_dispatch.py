"""Data sources find their scorer; slow scorers run under a limit; the unknown is explained."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings

from strop.catalog import SCORERS
from strop.rewards.function import find_scorer, score_response
from tests.rewards import hostile
from tests.rewards.test_rules import model_text


@pytest.mark.parametrize(
    ("source", "scorer"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "math_boxed"),
        ("HuggingFaceH4/MATH-500", "math_boxed"),
        ("math", "math_dapo"),
        ("aime_2024", "math_dapo"),
        ("numina_olympiads", "math_symbolic"),
        ("hiyouga/geometry3k", "geo3k"),
        ("searchR1_hotpotqa", "search_qa"),
        ("cais/mmlu", "multiple_choice"),
    ],
)
def test_sources(source: str, scorer: str) -> None:
    assert find_scorer(source).name == scorer


def test_every_declared_scorer_loads() -> None:
    assert all(callable(SCORERS.get(name)) for name in SCORERS.names())


@pytest.mark.parametrize("source", ["openai/gsm8k", "aime_2024", "numina_olympiads", "arithmetic"])
def test_nothing_to_compare_with_is_no_zero(source: str) -> None:
    for missing in (None, float("nan")):  # NaN: how data frames write a missing value
        with pytest.raises(ValueError, match=rf"no ground truth, .* data source '{source}' compares"):
            score_response(source, "The answer is \\boxed{None}", missing)


def test_scores_and_options() -> None:
    assert score_response("openai/gsm8k", "#### 8", "8", {"index": 3}) == 1.0
    assert score_response("openai/gsm8k", "it is 8", "8") == 0.0
    assert score_response("openai/gsm8k", "it is 8", "8", method="flexible") == 1.0
    assert score_response("math_dapo", "Answer: 9", "8") == {"score": -1.0, "acc": False, "pred": "9"}


def test_slow_scorers_run_elsewhere() -> None:
    found = score_response("numina_cn_k12", r"\boxed{x+x}", "2x")
    assert isinstance(found, dict) and found["acc"] is True


def test_unknown_sources_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="Did you mean 'openai/gsm8k'") as error:
        score_response("openai/gsm8", "x", "x")
    assert "custom_reward_function.path" in str(error.value) and "plugins" in str(error.value)
    with pytest.raises(ValueError, match="it is NoneType"):
        score_response("openai/gsm8k", None, "x")  # type: ignore[arg-type]


def test_a_scorer_that_hangs_raises_and_never_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCORERS, "_entries", dict(SCORERS._entries))
    SCORERS.declare("hanging", hostile.catastrophic_score, source="test", sources=("hang/*",), slow=True)
    start = time.perf_counter()
    with pytest.raises(TimeoutError, match="catastrophic_score did not answer within its limit of 1 seconds"):
        score_response("hang/me", "a" * 60, "b", timeout=1.0)
    assert time.perf_counter() - start < 200


def test_exact_names_and_longer_patterns_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCORERS, "_entries", dict(SCORERS._entries))
    SCORERS.declare("mine", hostile.add, source="test", sources=("aime_2025*",))
    SCORERS.declare("exact", hostile.add, source="test", sources=("aime_2025",))
    assert find_scorer("aime_2025_II").name == "mine"
    assert find_scorer("aime_2025").name == "exact"
    assert find_scorer("aime_2024").name == "math_dapo"


@given(model_text, model_text)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_text_makes_the_symbolic_scorer_raise(text: str, truth: str) -> None:
    found = score_response("numina_any", text, truth, timeout=60.0)
    assert isinstance(found, dict) and found["score"] in (0.0, 1.0)
