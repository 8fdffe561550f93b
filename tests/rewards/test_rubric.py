"""Rubrics, votes and the cost of a judge."""

from __future__ import annotations

import itertools

import pytest

from strop.config.schema.reward import JudgeConfig
from strop.rewards.judge import ChatCompletionsClient, Judge, check_judge
from strop.rewards.rubric import combine_votes, read_rubric, rubric_marks, weighted_mark
from strop.rewards.scorer import Scorer
from tests.rewards.scene import TOKENIZER, trajectory
from tests.rewards.test_judge import serve  # noqa: F401 - a fixture

RUBRIC = {"correct": {"text": "the result is right", "weight": 3}, "clear": "each step follows"}


def test_marks_are_found_by_name_and_weighted():
    criteria = read_rubric(RUBRIC)
    reply = "It is right.\n**Correct**: 8/10\n- clear: 4\nclear: 6.5"
    marks = rubric_marks(criteria, reply)
    assert marks == {"correct": 8.0, "clear": 6.5}
    assert weighted_mark(criteria, marks) == pytest.approx((3 * 8 + 6.5) / 4)
    with pytest.raises(ValueError, match="no mark for 'clear'"):
        rubric_marks(criteria, "correct: 8")


@pytest.mark.parametrize(
    ("rubric", "said"),
    [
        ({"a": ""}, "needs a text"),
        ({"a": {"weight": 2}}, "needs a text"),
        ({"a": {"text": "x", "weight": 0}}, "above 0"),
        ({"a": {"text": "x", "wieght": 2}}, "it takes text and weight"),
    ],
)
def test_a_rubric_that_cannot_be_read_is_refused(rubric, said):
    with pytest.raises(ValueError, match=said):
        check_judge(JudgeConfig(rubric=rubric), timeout=1.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rubric": RUBRIC, "template": "grade {answer}"}, r"does not contain \{rubric\}"),
        ({"votes": 3}, "all votes would be the same"),
        ({"price": [1.0]}, r"must be \[prompts, replies\]"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        check_judge(JudgeConfig(**settings), timeout=1.0)


def test_votes_are_averaged_and_failed_ones_left_out():
    one, two = {"score": 1.0, "judge_mark": 10.0}, {"score": 0.4, "judge_mark": 4.0}
    found = combine_votes([one, one, two, ValueError("no mark")])
    assert found == {"score": pytest.approx(0.8), "judge_mark": 8.0, "judge_agreement": pytest.approx(2 / 3)}
    assert combine_votes([one]) == one
    error = ValueError("no mark")
    assert combine_votes([error, ValueError("later")]) is error


def test_a_judge_with_a_rubric_votes_and_costs(serve):  # noqa: F811
    marks = itertools.cycle([8, 8, 2])

    def speak(question: str):
        assert "- correct: the result is right\n- clear: each step follows" in question
        text = f"correct: {next(marks)}\nclear: 4"
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return 200, {"choices": [{"message": {"content": text}}], "usage": usage}

    settings = JudgeConfig(
        url=serve(speak).url, rubric=RUBRIC, votes=3, temperature=0.7, price=[2.0, 10.0], max_concurrent=1
    )
    judge = Judge(ChatCompletionsClient(settings, timeout=10), settings)
    scorer = Scorer(TOKENIZER, manager=None, model=judge)
    one = trajectory("an answer")
    report = scorer.score([one])
    assert one.score == pytest.approx((3 * 6 + 4) / 4 / 10)
    assert one.extras["judge_correct"] == 6.0 and one.extras["judge_agreement"] == pytest.approx(2 / 3)
    counted = {name.removeprefix("reward/judge_"): value for name, value in report.metrics.items()}
    assert (counted["requests"], counted["cached"]) == (3, 0)
    assert (counted["prompt_tokens"], counted["completion_tokens"]) == (300, 30)
    assert counted["cost"] == pytest.approx((300 * 2 + 30 * 10) / 1e6)
    again = trajectory("an answer")
    report = scorer.score([again])
    assert again.score == one.score and report.metrics["reward/judge_cached"] == 3
    assert report.metrics["reward/judge_requests"] == report.metrics["reward/judge_cost"] == 0


def test_other_scorers_report_no_judge():
    class Manager:
        def score(self, samples):
            return [1.0 for _ in samples]

    report = Scorer(TOKENIZER, manager=Manager()).score([trajectory("x")])
    assert not [name for name in report.metrics if "judge" in name]
