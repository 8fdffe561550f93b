"""How reward functions are called: the form that their parameters say, and what they get."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.config.schema.data import DataConfig
from strop.data.prompts import build_prompts
from strop.rewards.base import RewardSample
from strop.rewards.function import RewardFunction
from strop.rewards.signatures import ROW_FACTS, CallStyle, style_of
from strop.types import Prompt, Trajectory
from tests.data.tokens import character_tokenizer


def sample(text: str = "4", **extra: object) -> RewardSample:
    """A response to `2+2=`; its row has the column `answer`."""
    info: dict[str, object] = {"answer": "4", ROW_FACTS: {"text_prompt": True}, **extra}
    prompt = Prompt(0, [], [{"role": "user", "content": "2+2="}], "sums", "four", info)
    return RewardSample(Trajectory(prompt, 0, [1, 2], [1, 1], [0.0, 0.0]), text, dict(info))


@pytest.mark.parametrize(
    ("function", "style"),
    [
        (lambda completion, **row: 0, CallStyle.COLUMNS),
        (lambda prompts, completions, **columns: [], CallStyle.COLUMN_LISTS),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, CallStyle.VERL),
        (lambda ground_truth: 0, CallStyle.VERL),
        (lambda solution_strs, ground_truths: [], CallStyle.VERL_LISTS),
        (lambda text: 0, None),
        (lambda **row: 0, None),
    ],
)
def test_parameters_say_the_form(function: Callable[..., object], style: CallStyle | None) -> None:
    assert style_of(function, "f") is style


@pytest.mark.parametrize(
    "function",
    [
        lambda completion, completions: 0,
        lambda completion, solution_str: 0,
        lambda solution_str, solution_strs: 0,
    ],
)
def test_two_forms_at_once_are_refused(function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"f takes .* and .*different forms.*Keep one"):
        style_of(function, "f")


def test_columns_come_by_name() -> None:
    assert RewardFunction(lambda completion, answer: completion == answer)(sample()) is True
    seen = RewardFunction(lambda completion, **row: row)(sample(level=3))
    assert seen == {
        **{"prompt": "2+2=", "answer": "4", "level": 3, "completion_ids": [1, 2]},
        **{"data_source": "sums", "ground_truth": "four"},
    }
    assert RewardFunction(lambda completion, k=1: k, {"k": 5})(sample()) == 5
    with pytest.raises(ValueError, match=r"needs 'level', but the row has no such column. It has: .*answer"):
        RewardFunction(lambda completion, level: 0)(sample())


def test_columns_of_a_file_come_by_name(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    rows = [{"prompt": "2+2=", "answer": "4", "hint": "even"}, {"prompt": "2+3=", "answer": "5"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = build_prompts(DataConfig(train_files=str(file), label_key="answer"), character_tokenizer())
    responses = [Trajectory(dataset[row], row, [1], [1], [0.0]) for row in range(2)]
    samples = [RewardSample(response, "4", {}) for response in responses]

    def plain(completion: str, prompt: str, answer: str, hint: str | None) -> float:
        assert (prompt, hint) in [("2+2=", "even"), ("2+3=", None)]
        return float(completion == answer)

    def trl(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float]:
        assert prompts == ["2+2=", "2+3="] and columns["hint"] == ["even", None]
        return [float(text == right) for text, right in zip(completions, answer)]

    assert [RewardFunction(plain)(one) for one in samples] == [1.0, 0.0]
    assert RewardFunction(trl, takes_lists=True).call_with_lists(samples) == [1.0, 0.0]
    assert RewardFunction(lambda extra_info: extra_info)(samples[0]) == {}


def test_lists_come_by_name() -> None:
    def trl(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float]:
        assert prompts == ["2+2="] * 2 and columns["ground_truth"] == ["four"] * 2
        return [float(text == right) for text, right in zip(completions, answer)]

    function = RewardFunction(trl, takes_lists=True)
    assert function.call_with_lists([sample("4"), sample("5")]) == [1.0, 0.0]
    assert RewardFunction(trl, takes_lists=None).takes_lists


def test_the_reward_manager_must_fit_the_form() -> None:
    with pytest.raises(ValueError, match=r"requires completions.*reward_manager=batch"):
        RewardFunction(lambda completions: 0)
    with pytest.raises(ValueError, match=r"requires completion,.*reward_manager=naive"):
        RewardFunction(lambda completion: 0, takes_lists=True)


def test_functions_of_verl_do_not_see_facts_of_ours() -> None:
    assert RewardFunction(lambda extra_info: extra_info)(sample()) == {"answer": "4"}
    lists = RewardFunction(lambda extra_infos: extra_infos, takes_lists=True)
    assert lists.call_with_lists([sample()]) == [{"answer": "4"}]
