"""Responses and scores from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import strop


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def right_in_lists(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, answer)]


ANSWERED = [
    {"prompt": "1+1=", "answer": "2", "responses": ["2", "3"]},
    {"prompt": "1+2=", "answer": "3", "responses": ["3", "3"]},
]


def test_a_model_answers(task: Path) -> None:
    keys = {"n": 2, "max_response_length": 4, "max_prompt_length": 8, "seed": 3}
    table = strop.generate(task / "model", ["1+1=", "2+2="], **keys)  # type: ignore[arg-type]
    assert table["prompt"] == ["1+1=", "2+2="] and [len(row) for row in table["responses"]] == [2, 2]  # type: ignore[arg-type]


def test_rows_come_back_as_they_were_given(
    task: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also the columns that only scoring reads: the responses can be scored afterwards."""
    monkeypatch.setenv("HOME", str(tmp_path))
    rows: list[dict[str, object]] = [
        {"question": "1+1=", "ground_truth": "2", "data_source": "sums", "extra_info": {"level": 1}},
        {"question": "1+2=", "ground_truth": "3", "data_source": "sums", "level": 2},
    ]
    keys = {"max_response_length": 4, "max_prompt_length": 8, "prompt_key": "question"}
    table = strop.generate(task / "model", rows, output="~/out/answers.parquet", **keys)  # type: ignore[arg-type]
    assert (tmp_path / "out" / "answers.parquet").exists()
    for row, given in zip(table, rows, strict=True):
        assert {**row, "responses": 0} == {**given, "responses": 0}

    def reward(
        data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]
    ) -> float:
        assert data_source == "sums" and ground_truth in ("2", "3")
        return 1.0

    found = strop.evaluate(None, table, reward, prompt_key="question")
    assert found["score"] == 1.0 and found.rows["prompt"] == ["1+1=", "1+2="]


def test_keys_of_a_generation_that_does_not_happen_are_refused() -> None:
    with pytest.raises(ValueError, match=r"generates none, so n=4 would change nothing"):
        strop.evaluate(None, ANSWERED, right, n=4)


def test_one_text_is_not_a_file_of_prompts(task: Path) -> None:
    with pytest.raises(ValueError, match="prompts is one text, 'two'"):
        strop.generate(task / "model", "two")


@pytest.mark.parametrize("reward", [right, right_in_lists, [right, right_in_lists]])
def test_responses_are_scored(reward: object) -> None:
    found = strop.evaluate(None, ANSWERED, reward)  # type: ignore[arg-type]
    each = 2.0 if isinstance(reward, list) else 1.0
    assert found["score"] == 0.75 * each
    assert found.rows["scores"] == [[each, 0.0], [each, each]] and found.rows["answer"] == ["2", "3"]
    if isinstance(reward, list):
        assert found["right"] == 0.75 and found["right_in_lists"] == 0.75
    assert "2 prompts, 4 responses" in repr(found)
    with pytest.raises(KeyError, match=r"no metric 'accuracy'. Metrics: .*score"):
        _ = found["accuracy"]


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"asks for 'level', but data has no such column"):
        strop.evaluate(None, ANSWERED, lambda completion, level: 0.0)
    with pytest.raises(ValueError, match=r"Scoring failed for all 4 responses.*ZeroDivisionError"):
        strop.evaluate(None, ANSWERED, lambda completion: 1 / 0)


def test_numbers_of_a_reward_are_metrics() -> None:
    def graded(completion: str, answer: str) -> dict[str, object]:
        return {"score": float(completion == answer), "length": len(completion), "said": completion}

    found = strop.evaluate(None, ANSWERED, graded)
    assert found["length"] == 1.0 and found["score"] == 0.75
    with pytest.raises(KeyError, match="said"):
        _ = found["said"]
