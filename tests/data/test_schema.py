"""Rows are understood in both worlds' layouts; what is missing is named with its row and the nearest column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.schema.data import DataConfig
from strop.data.files import open_rows
from strop.data.schema import (
    ColumnKeys,
    as_messages,
    check_columns,
    nested_value,
    parse_row,
    read_row,
    split_placeholders,
    to_plain,
)

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3},
    "agent_name": "tool_agent",
}


def test_a_row_in_verls_layout() -> None:
    fields = parse_row(VERL, ColumnKeys(), where="row 0")
    assert fields.messages == [{"role": "user", "content": "2+2?"}]
    assert (fields.data_source, fields.ground_truth, fields.style) == ("openai/gsm8k", "4", "rule")
    assert (fields.ability, fields.extra_info, fields.agent_name) == ("math", {"index": 3}, "tool_agent")


def test_a_row_in_openrlhfs_layout() -> None:
    keys = ColumnKeys(prompt="input", label="answer", input_template="Human: {}\nAssistant: ")
    fields = parse_row({"input": "2+2?", "answer": 4}, keys, where="row 0", stem="sums")
    assert fields.messages == [{"role": "user", "content": "Human: 2+2?\nAssistant: "}]
    assert (fields.data_source, fields.ground_truth, fields.extra_info) == ("sums", 4, {})
    assert parse_row({"input": "2", "answer": 4, "datasource": "x"}, keys, where="row 0").data_source == "x"


def test_keys_follow_the_configuration() -> None:
    config = DataConfig(
        prompt_key="q", label_key="a", reward_fn_key="kind", image_key="pics", input_template="<{}>"
    )
    assert ColumnKeys.from_config(config) == ColumnKeys(
        prompt="q", label="a", source="kind", images="pics", input_template="<{}>"
    )


def test_missing_columns_name_the_nearest() -> None:
    with pytest.raises(
        ValueError,
        match=r"a\.parquet has no column 'prompt', which data\.prompt_key=prompt asks for\. Did you mean 'promt'",
    ):
        check_columns(["promt", "data_source"], ColumnKeys(), where="a.parquet")
    with pytest.raises(
        ValueError, match=r"data\.reward_fn_key=data_source asks for\. Did you mean 'datasource'"
    ):
        check_columns(["prompt", "reward_model", "datasource"], ColumnKeys(), where="a.parquet")
    with pytest.raises(ValueError, match=r"no column 'label'"):
        check_columns(["prompt", "answer"], ColumnKeys(label="label"), where="a.parquet")
    check_columns(["prompt"], ColumnKeys(), where="a.parquet")
    check_columns(["prompt", "answer"], ColumnKeys(label="answer"), where="a.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, r"row 7: the prompt column 'prompt' is empty"),
        ({"prompt": []}, r"row 7, column 'prompt' is list \[\]; it must be text, or a list of messages"),
        ({"prompt": 5}, r"column 'prompt' is int 5"),
        ({"prompt": [{"content": "x"}]}, r"message 0 is dict .*a message is"),
        (
            {"prompt": [{"role": "user", "content": 5}]},
            r"message 0: content is int 5; it must be text or a list of parts",
        ),
        ({"reward_model": "rule"}, r"row 7: the column 'reward_model' is str 'rule'; it must be a struct"),
        ({"extra_info": [1]}, r"the column 'extra_info' is list \[1\]"),
        ({"data_source": None}, r"row 7: the column 'data_source' is empty; it chooses the scorer"),
        ({"images": "a.png"}, r"the column 'images' is str 'a.png'; it must be a list"),
        ({"images": ["a.png"]}, r"the prompt has 0 <image> placeholders but the row has 1 images"),
        (
            {"prompt": '[{"role": "user", "content": "1+1="}]'},
            "written out as text, str .* store the list itself",
        ),
        ({"prompt": "[{'content': '1+1=', 'role': 'user'}]"}, "written out as text"),
    ],
)
def test_bad_rows_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_row({**VERL, **change}, ColumnKeys(), where="row 7")


def test_null_filled_structs_of_parquet_are_cleaned(tmp_path: Path) -> None:
    rows = [
        {**VERL, "extra_info": {"tools_kwargs": {"search": {"create_kwargs": {"k": 1}}}}},
        {**VERL, "extra_info": {"tools_kwargs": {"calculator": {"create_kwargs": {"digits": 3}}}}},
        {**VERL, "prompt": [{"role": "assistant", "tool_calls": ["f"]}], "extra_info": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = open_rows(str(tmp_path / "a.parquet"))
    assert read[0]["extra_info"]["tools_kwargs"]["calculator"] is None, "parquet did fill it"
    assert read_row(read, 0, ColumnKeys()).extra_info == rows[0]["extra_info"]
    assert read_row(read, 1, ColumnKeys()).extra_info == rows[1]["extra_info"]
    assert read_row(read, 0, ColumnKeys()).messages == VERL["prompt"], "no tool_calls: null"
    assert read_row(read, 2, ColumnKeys()).messages == [
        {"role": "assistant", "tool_calls": ["f"], "content": ""}
    ]
    assert read_row(read, 2, ColumnKeys()).extra_info == {}


def test_nested_numpy_and_arrow_become_plain() -> None:
    value = {
        "a": np.array([{"role": "user", "n": np.int64(3)}], dtype=object),
        "b": np.float32(0.5),
        "c": pa.scalar([1, None]),
    }
    assert to_plain(value) == {"a": [{"role": "user", "n": 3}], "b": 0.5, "c": [1, None]}
    assert type(to_plain(np.float64(1.5))) is float and type(to_plain(np.bool_(True))) is bool


json_like = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(json_like)
@settings(max_examples=40, deadline=None)
def test_plain_values_stay_as_they_are(value: object) -> None:
    assert to_plain(value) == value


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "data_source", "reward_model", "extra_info", "images"]),
        json_like | st.none(),
    )
)
@settings(max_examples=50, deadline=None)
def test_any_row_is_understood_or_refused(row: dict) -> None:
    try:
        fields = parse_row(row, ColumnKeys(), where="row 0")
    except ValueError as error:
        assert "row 0" in str(error)
    else:
        assert fields.messages and isinstance(fields.data_source, str)


def test_placeholders_become_parts_in_order() -> None:
    messages = [{"role": "user", "content": "<image>and <video><image>?"}]
    parts = split_placeholders(messages, {"image": 2, "video": 1}, where="row 0")[0]["content"]
    assert parts == [
        {"type": "image"},
        {"type": "text", "text": "and "},
        {"type": "video"},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    assert split_placeholders(messages, {"image": 0, "video": 0}, where="row 0") == messages, (
        "text without images stays text"
    )


@pytest.mark.parametrize("template", ["no place", "{} {}", "{name}", "{", "{0.x}"])
def test_bad_input_templates_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"data\.input_template="):
        ColumnKeys(input_template=template)


def test_input_templates_leave_messages_alone() -> None:
    assert (
        as_messages([{"role": "user", "content": "x"}], where="row 0", input_template="<{}>")[0]["content"]
        == "x"
    )


def test_dig_follows_a_path() -> None:
    row = {"extra_info": {"question": {"text": "2+2?"}}}
    assert nested_value(row, "extra_info", ["question", "text"], where="row 0") == "2+2?"
    assert nested_value(row, "extra_info", None, where="row 0") == row["extra_info"]
    with pytest.raises(
        ValueError, match=r"row 0: 'extra_info' holds no 'questoin'\. Did you mean 'question'"
    ):
        nested_value(row, "extra_info", ["questoin"], where="row 0")


def test_reward_functions_get_the_columns_of_a_row() -> None:
    keys = ColumnKeys(prompt="question", label="answer", images="pics")
    plain = {"question": "2+2?", "answer": 4, "level": np.int64(2), "pics": [], "data_source": "sums"}
    found = parse_row({**plain, "prompt": "other"}, keys, where="row 0", columns=[*plain, "hint"])
    assert found.columns == {"prompt": "2+2?", "answer": 4, "level": 2, "hint": None}
    assert found.extra_info == {}
    assert parse_row(VERL, ColumnKeys(), where="row 0").columns == {
        "ability": "math",
        "agent_name": "tool_agent",
    }
