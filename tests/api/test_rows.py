"""Rows that are given as objects: every kind of them, what a file of them gives back, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from strop.api.rows import RowKeys, is_files, prompt_rows, read_rows, reward_columns, write_rows
from strop.data.files import open_rows
from strop.data.schema import ColumnKeys, read_row
from strop.rewards.base import RewardSample
from strop.rewards.signatures import column_arguments, list_arguments
from strop.types import Prompt, Trajectory

ROWS = [{"prompt": "a", "answer": 1, "note": None}, {"prompt": "b", "answer": 2, "tags": ["x"]}]


class Frame:
    """What the functions use of a pandas frame."""

    columns = ("prompt", "answer")
    iloc = None

    def to_dict(self, kind: str) -> list[dict[str, object]]:
        assert kind == "records"
        return [{"prompt": "a", "answer": np.int64(1), "note": float("nan")}]


class HubDataset:
    """What the functions use of datasets.Dataset."""

    column_names = ("prompt", "answer")

    def __iter__(self) -> Any:
        return iter([{"prompt": "a", "answer": np.array([1, 2])}])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([{"prompt": "a"}], [{"prompt": "a"}]),
        ((row for row in [{"prompt": "a"}]), [{"prompt": "a"}]),
        (Frame(), [{"prompt": "a", "answer": 1, "note": None}]),
        (HubDataset(), [{"prompt": "a", "answer": [1, 2]}]),
        (pyarrow.table({"prompt": ["a"]}), [{"prompt": "a"}]),
    ],
    ids=["list", "iterable", "frame", "data set", "arrow"],
)
def test_rows_of_every_kind(data: object, expected: object) -> None:
    assert read_rows(data, "train") == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "train holds no rows"),
        ([{"prompt": "a"}, "b"], "train: row 1 is a str; a row is a dict"),
        ({"train": [{"prompt": "a"}]}, r"give one: train=data\['train'\]"),
        (3, "train is a int; it must be rows"),
        (b"x", "train is a bytes"),
    ],
)
def test_what_is_no_data_is_refused(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rows(data, "train")


def test_paths_are_files_and_prompts_are_not() -> None:
    assert is_files("a.parquet") and is_files(Path("a.parquet")) and is_files(["a.jsonl", Path("b.json")])
    assert not is_files(["2+2="]) and not is_files([]) and not is_files([{"prompt": "a"}])


def sample_of(file: Path, index: int, text: str = "answer") -> RewardSample:
    """The sample that a reward function gets for a row of a file."""
    fields = read_row(open_rows(str(file)), index, ColumnKeys())
    prompt = Prompt(index, [], fields.messages, fields.data_source, fields.ground_truth, fields.extra_info)
    return RewardSample(Trajectory(prompt, 0, [5], [1], [0.0]), text, dict(fields.extra_info))


def test_a_reward_function_gets_the_columns_as_they_were(tmp_path: Path) -> None:
    file = write_rows(prompt_rows(ROWS, RowKeys(), "train"), tmp_path, "train")
    assert file.suffix == ".parquet" and file.name.startswith("train-")
    first = column_arguments(sample_of(file, 0))
    assert first == {
        "data_source": "custom",
        "ground_truth": None,
        "completion_ids": [5],
        "answer": 1,
        "note": None,
        "tags": None,
        "prompt": "a",
        "completion": "answer",
    }
    lists = list_arguments([sample_of(file, 0), sample_of(file, 1)])
    assert lists["prompts"] == ["a", "b"] and lists["completions"] == ["answer", "answer"]
    assert lists["tags"] == [None, ["x"]] and "prompt" not in lists and "completion" not in lists


def test_messages_stay_messages_and_completions_follow_them(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    rows = [{"prompt": messages, "ground_truth": "1", "data_source": "sums", "extra_info": {"level": 2}}]
    file = write_rows(prompt_rows(rows, RowKeys(), "train"), tmp_path, "train")
    sample = sample_of(file, 0)
    found = column_arguments(sample)
    assert found["prompt"] == messages and found["completion"] == "answer"
    assert (found["ground_truth"], found["data_source"], found["level"]) == ("1", "sums", 2)
    assert list_arguments([sample])["completions"] == [[{"role": "assistant", "content": "answer"}]]


def test_values_of_several_types_are_written_as_json(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": "two"}]
    file = write_rows(prompt_rows(rows, RowKeys(), "train"), tmp_path, "train")
    assert file.suffix == ".jsonl"
    assert [column_arguments(sample_of(file, index))["answer"] for index in (0, 1)] == [1, "two"]
    nested = [{"prompt": "a", "answer": [{"x": 1}]}, {"prompt": "b", "answer": [{"x": 2.5}]}]
    for rows in ([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2.5}], nested):
        mixed = write_rows(prompt_rows(rows, RowKeys(), "train"), tmp_path, "train")
        found = [column_arguments(sample_of(mixed, index))["answer"] for index in (0, 1)]
        assert repr(found) == repr([row["answer"] for row in rows])  # 1, not 1.0
        mixed.unlink()
    empty = write_rows([{"prompt": "a", "answer": {}}], tmp_path, "train")
    assert open_rows(str(empty))[0] == {"prompt": "a", "answer": {}}
    empty.unlink()
    with pytest.raises(ValueError, match=r"train: row 0, column 'answer' cannot be written.*object"):
        write_rows([{"prompt": "a", "answer": object()}], tmp_path, "train")
    shown = [{"prompt": "a", "image": b"x", "answer": 1}, {"prompt": "b", "image": b"y", "answer": 2.5}]
    with pytest.raises(ValueError, match=r"row 0, column 'image' cannot be.*mixes types.*'answer' does"):
        write_rows(shown, tmp_path, "train")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_the_same_rows_have_the_same_file(tmp_path: Path) -> None:
    one = write_rows([{"prompt": "a"}], tmp_path, "train")
    assert write_rows([{"prompt": "a"}], tmp_path, "train") == one
    assert write_rows([{"prompt": "b"}], tmp_path, "train") != one


def test_a_missing_prompt_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train has no column 'prompt'.*Its columns: question, answer"):
        prompt_rows([{"question": "a", "answer": "b"}], RowKeys(), "train")
    assert reward_columns([{"prompt": "a", "extra_info": {"level": 1}}]) == {"prompt", "extra_info", "level"}
