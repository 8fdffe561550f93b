"""Rows that are damaged or hold text that no tokenizer takes: the error names file, row and column."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from strop.data.chat import Chat, has_escaped_surrogate, lone_surrogate, refuse_surrogates
from strop.data.files import open_file, open_rows
from strop.data.schema import ColumnKeys, read_row
from strop.quickstart.tiny_model import tiny_tokenizer

PLAIN = [{"prompt": "1+1=", "extra": {"a": [1, "é", "\U0001f600"]}}, {"prompt": "2+2=", "extra": None}]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "a\ud800b"}, "'prompt'"),
        ({"prompt": [{"role": "user", "content": "\udfff"}]}, "'prompt'"),
        ({"prompt": "x", "extra": {"deep": ["\ud83d"]}}, "'extra'"),
        ({"prompt": "x", "na\udc00me": 1}, "'na.+me'"),
    ],
    ids=range(4),
)
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_half_of_a_surrogate_pair(tmp_path: Path, row: dict[str, object], column: str, kind: str) -> None:
    rows = [*PLAIN, row]
    file = tmp_path / f"rows.{kind}"
    text = json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows))
    file.write_text(text)
    with pytest.raises(
        ValueError, match=rf"rows\.{kind}, row 2, column {column} holds half of a surrogate pair"
    ):
        open_file(str(file))


@pytest.mark.parametrize("kind", ["jsonl", "json"])
@pytest.mark.parametrize(
    ("row", "key"),
    [('{"prompt": "x", "a": 1, "prompt": "y"}', "prompt"), ('{"extra": [{"b": {"c": 1, "c": 1}}]}', "c")],
    ids=["column", "nested"],
)
def test_a_key_that_a_row_has_twice(tmp_path: Path, row: str, key: str, kind: str) -> None:
    """Python's parser keeps the last value of such a key."""
    lines = [json.dumps(PLAIN[0]), row, json.dumps(PLAIN[1])]
    file = tmp_path / f"rows.{kind}"
    file.write_text("[\n" + " ,\n".join(lines) + "\n]" if kind == "json" else "\n" + "\n".join(lines))
    with pytest.raises(ValueError, match=rf"rows\.{kind}, row 1 \(line 3\) has the key '{key}' twice"):
        open_file(str(file))


@pytest.mark.parametrize("depth", [500, 5000])
def test_values_that_are_nested_too_deeply(tmp_path: Path, depth: int) -> None:
    """JSON is read to a greater depth than rows are."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "x", "extra_info": {"a": ' + "[" * depth + "]" * depth + "}}")
    with pytest.raises(
        ValueError, match=r"rows\.jsonl, row 0 (has lists or objects that are nested|cannot be)"
    ):
        read_row(open_rows(str(file)), 0, ColumnKeys())


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_whole_pairs_are_text(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"rows.{kind}"
    text = json.dumps(PLAIN) if kind == "json" else "\n".join(map(json.dumps, PLAIN))
    assert has_escaped_surrogate(text.encode())
    file.write_text(text)
    opened = open_file(str(file))
    assert [opened[row] for row in range(len(opened))] == PLAIN


def test_messages_of_data_sets_without_files() -> None:
    for chat in (Chat(tiny_tokenizer()), Chat(tiny_tokenizer(), plain=True)):
        message = {"role": "user", "content": "1+\ud800"}
        with pytest.raises(ValueError, match=r"A message holds half of a surrogate pair \(U\+D800 at"):
            chat.ids([message])
        with pytest.raises(ValueError, match="cannot be tokenized"):
            chat.lengths([[message]])


def test_where_the_surrogate_is() -> None:
    assert lone_surrogate("plain é \U0001f600") is None
    assert lone_surrogate("ab\udc80") == "half of a surrogate pair (U+DC80 at character 2), which is no text"
    refuse_surrogates({"a": ["\U0001f600"], "b": None}, "here")


def test_mutated_rows_give_rows_or_a_named_error(tmp_path: Path) -> None:
    """300 damaged files."""
    right = "\n".join(map(json.dumps, PLAIN)).encode()
    array = json.dumps(PLAIN).encode()
    refused = 0
    for case in range(300):
        chance = random.Random(case)
        name = chance.choice(["rows.jsonl", "rows.json"])
        data = bytearray(array if name == "rows.json" else right)
        for _ in range(chance.choice([1, 2, 6])):
            place = chance.randrange(len(data))
            data[place : place + chance.choice([0, 1, 1, 5])] = chance.choice(
                [
                    b"\\ud800",
                    b"\xff",
                    b"[",
                    b"NaN",
                    b"1e999",
                    b"\x00",
                    b'"',
                    b"{",
                    b"[" * 5000,
                    b"9" * 5000,
                    b"\n",
                    b"",
                ]
            )
        file = tmp_path / name
        file.write_bytes(bytes(data))
        try:
            opened = open_file(str(file))
            assert all(isinstance(opened[row], dict) for row in range(len(opened))), f"case {case}"
        except ValueError as error:
            assert name in str(error), f"case {case}"
            refused += 1
    assert refused > 150
