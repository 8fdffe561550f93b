"""Rows come back as they were written, from every format and place; broken files are named with their cause."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.data.fetch import fetch
from strop.data.files import count_rows, open_file, open_rows
from strop.data.row_files import ParquetFile
from tests.http_servers import PatientServer

ROWS = [
    {"prompt": f"{n}+1=", "reward_model": {"style": "rule", "ground_truth": str(n + 1)}} for n in range(5)
]


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    else:
        path.write_text(json.dumps(rows, indent=1))
    return str(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = open_rows(write(tmp_path / name, ROWS))
    assert list(rows) == ROWS
    assert rows.columns == ["prompt", "reward_model"]
    assert list(rows.column("prompt")) == [row["prompt"] for row in ROWS]
    assert count_rows(str(tmp_path / name)) == 5
    assert list(pickle.loads(pickle.dumps(rows))) == ROWS, "worker processes get a copy"


def test_json_lines_in_a_json_file_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}\n\n{"a": "2020-01-01", "b": null}\n  \n')
    rows = open_rows(str(tmp_path / "a.json"))
    assert list(rows) == [{"a": 1}, {"a": "2020-01-01", "b": None}], "mixed types stay, dates stay text"
    assert rows.columns == ["a", "b"]
    assert count_rows(str(tmp_path / "a.json")) == 2


@pytest.mark.slow  # 2.1 GiB of images, twice in memory
def test_lists_of_more_than_two_gigabytes_in_one_row_group(tmp_path: Path) -> None:
    """pandas writes up to a million rows into one row group; images in lists are soon 2 GiB."""
    image = bytes(16 << 20)
    images = pa.DictionaryArray.from_arrays(pa.array([0] * 132, pa.int32()), pa.array([image], pa.binary()))
    lists = pa.ListArray.from_arrays(range(133), pa.StructArray.from_arrays([images], ["bytes"]))
    table = pa.table({"prompt": [f"{n}+1=" for n in range(132)], "images": lists})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False)
    rows = open_rows(str(tmp_path / "a.parquet"))
    last = rows[131]
    same = last["images"][0]["bytes"] == image  # in two steps: pytest would print the bytes
    assert same
    assert last["prompt"] == "131+1="
    assert sum(len(value[0]["bytes"]) for value in rows.column("images")) == 132 * len(image)


def test_lists_that_arrow_does_not_join_are_read_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [{**row, "turns": [{"role": str(n)}] * (n % 3)} for n, row in enumerate(ROWS * 40)]
    file = write(tmp_path / "a.parquet", many)

    def refuse(*arguments: object, **more: object) -> None:
        raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

    monkeypatch.setattr(pq, "read_table", refuse)
    rows = open_rows(file)
    assert list(rows) == many
    assert list(rows.column("turns")) == [row["turns"] for row in many]


def test_rows_of_several_files_are_placed(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.parquet", ROWS[:2]), write(tmp_path / "b.jsonl", ROWS[2:])
    rows = open_rows([first, second])
    assert list(rows) == ROWS
    assert rows.where(1) == f"{first}, row 1"
    assert rows.where(2) == f"{second}, row 0"
    with pytest.raises(IndexError, match="Row 5 of 5"):
        rows[5]


def test_opening_parquet_does_not_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", ROWS)
    monkeypatch.setattr(pq, "read_table", lambda *a, **k: pytest.fail("was read"))
    file = open_file(path)
    assert isinstance(file, ParquetFile) and len(file) == count_rows(path) == 5
    assert file.columns == ["prompt", "reward_model"]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", ROWS)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_rows("~/a.jsonl")) == 5
    assert len(open_rows(f"file://{tmp_path}/a.jsonl")) == 5


def test_remote_files_are_fetched_once_per_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    local = write(tmp_path / "a.parquet", ROWS)
    memory.pipe("/bucket/train.parquet", Path(local).read_bytes())
    try:
        rows = open_rows("memory://bucket/train.parquet")
        assert list(rows) == ROWS
        assert rows.files[0].stem == "train"
        copy = fetch("memory://bucket/train.parquet")
        stamp = copy.stat().st_mtime_ns
        assert fetch("memory://bucket/train.parquet").stat().st_mtime_ns == stamp
        memory.pipe("/bucket/train.parquet", Path(write(tmp_path / "b.parquet", ROWS[:1])).read_bytes())
        assert len(open_rows("memory://bucket/train.parquet")) == 1
        assert not list((tmp_path / "cache").rglob("*.part"))
        with pytest.raises(
            ValueError, match=r"memory://bucket/none.parquet cannot be fetched: FileNotFoundError"
        ):
            open_rows("memory://bucket/none.parquet")
        with pytest.raises(ValueError, match=r"nosuch://a.parquet cannot be fetched"):
            open_rows("nosuch://a.parquet")

        class LibraryError(Exception):
            """Such as httpx.ConnectError and botocore's, which are no OSError."""

        def unreachable(path: str) -> bool:
            raise LibraryError("no network")

        monkeypatch.setattr(memory, "isfile", unreachable)
        with pytest.raises(ValueError, match=r"train.parquet cannot be fetched: LibraryError: no network"):
            open_rows("memory://bucket/train.parquet")
    finally:
        memory.store.clear()


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def test_a_file_that_changed_on_a_web_server_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    local = tmp_path / "train.jsonl"
    write(local, ROWS)
    with PatientServer(("127.0.0.1", 0), partial(QuietFiles, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/train.jsonl"
            assert list(open_rows(address)) == ROWS
            stamp = fetch(address).stat().st_mtime_ns
            assert fetch(address).stat().st_mtime_ns == stamp
            write(local, ROWS[:2])
            assert list(open_rows(address)) == ROWS[:2]
            write(local, ROWS[1:3])  # as long as before
            os.utime(local, (1e9, 1e9))
            assert list(open_rows(address)) == ROWS[1:3]
        finally:
            server.shutdown()


def test_times_of_pandas_are_read_without_pandas(tmp_path: Path) -> None:
    """In nanoseconds, also inside extra_info; arrow makes no Python value of them without pandas."""
    stamp = pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", "UTC"))
    span = pa.array([1_999], pa.duration("ns"))
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1], stamp)], ["seen"])
    columns = {"prompt": ["1+1="], "at": stamp, "took": span, "extra_info": nested}
    pq.write_table(pa.table(columns), tmp_path / "times.parquet")
    file = open_file(str(tmp_path / "times.parquet"))
    at = datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
    expected = {"prompt": "1+1=", "at": at, "took": timedelta(microseconds=1), "extra_info": {"seen": [at]}}
    assert file[0] == expected and list(file.column("at")) == [at]


def test_a_date_that_python_has_not_names_its_row(tmp_path: Path) -> None:
    years = pa.array([0, 2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "at": years}), tmp_path / "far.parquet")
    file = open_file(str(tmp_path / "far.parquet"))
    assert file[0]["prompt"] == "a"
    with pytest.raises(ValueError, match=r"far\.parquet, row 1 cannot be read as parquet: OverflowError"):
        file[1]
    with pytest.raises(ValueError, match=r"far\.parquet cannot be read as parquet \(column 'at'\)"):
        list(file.column("at"))


def test_bad_files_are_named_with_their_cause(tmp_path: Path) -> None:
    good = Path(write(tmp_path / "train.parquet", ROWS))

    def said(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError) as caught:
            list(open_rows(str(tmp_path / name)))
        assert str(tmp_path / name) in str(caught.value)
        return str(caught.value)

    assert "is empty (0 bytes)" in said("empty.parquet", b"")
    assert "cannot be read as parquet" in said("cut.parquet", good.read_bytes()[:-20])
    assert "cannot be read as parquet" in said("text.parquet", b"not a parquet file at all")
    assert "row 1 cannot be read as json: JSONDecodeError" in said("bad.jsonl", b'{"a": 1}\n{"a": \n')
    assert "row 0 is a JSON int" in said("number.jsonl", b"3\n")
    assert "row 1 is a JSON str" in said("array.json", b'[{"a": 1}, "x"]')
    assert "cannot be read as json" in said("bad.json", b'[{"a": 1},')
    assert "holds no rows" in said("none.json", b"[]")
    assert "holds no rows" in said("blank.jsonl", b"\n\n")
    assert "row 0 cannot be read as json: UnicodeDecodeError" in said("latin.jsonl", b'{"a": "\xe9"}\n')
    csv = said("a.csv", "\ufeffquestion,answer\n1+6,07\n".encode())
    assert "ends in '.csv'; files of rows end in .parquet" in csv
    rows = subprocess.check_output(csv.partition("Convert it: ")[2].partition(" >")[0], shell=True)
    assert json.loads(rows) == {"question": "1+6", "answer": "07"}
    assert "Decompress it: gunzip " in said("a.jsonl.gz", b"")
    with pytest.raises(ValueError, match=r"patterns are not expanded\. List the files: \[.*bad\.jsonl,.*\]"):
        open_rows(f"{tmp_path}/*.jsonl")
    for suffix, content in ((".jsonl", b'{"a": 1}\n'), (".parquet", good.read_bytes())):
        hidden = said(f"not named gz{suffix}", gzip.compress(content))
        assert "is compressed with gzip" in hidden
        subprocess.run(hidden.partition("Decompress it: ")[2], shell=True, check=True)
        assert (tmp_path / f"not named gz{suffix}").read_bytes() == content
    pq.write_table(pa.table([["1"], ["2"], ["3"]], names=["prompt", "a", "prompt"]), tmp_path / "t.parquet")
    twice = (tmp_path / "t.parquet").read_bytes()
    assert "has several columns 'prompt'. Rename" in said("t.parquet", twice)
    write(tmp_path / "zero.parquet", [])
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "zero.parquet")
    with pytest.raises(ValueError, match=r"zero\.parquet holds no rows"):
        open_rows(str(tmp_path / "zero.parquet"))


def test_a_file_that_is_written_again_in_place_is_an_error_not_a_bus_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"a": "{n} {"text" * 50}"}}\n' for n in range(500)))
    rows = open_rows(str(path))
    assert rows[499]["a"].startswith("499 ")
    path.write_text('{"a": "new"}\n')
    for reader in (rows, pickle.loads(pickle.dumps(rows))):
        with pytest.raises(ValueError, match=r"a\.jsonl had \d+ bytes when it was opened and has 13 now"):
            reader[400]


def test_pages_that_rot_are_found_on_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [f"{n} text" * 20 for n in range(500)]}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)
    path.write_bytes(content)
    rows = open_rows(str(path))
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet"):
        rows[0]


def test_missing_files_suggest_their_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", ROWS)
    with pytest.raises(ValueError, match=r"trian\.parquet does not exist. Did you mean 'train.parquet'"):
        open_rows(str(tmp_path / "trian.parquet"))
    with pytest.raises(ValueError, match=r"is a folder; name its files. It holds: train.parquet"):
        open_rows(str(tmp_path))
    with pytest.raises(ValueError, match=r"hf://datasets/Open-Orca/OpenOrca/FILE\.parquet"):
        open_rows("Open-Orca/OpenOrca")
    with pytest.raises(ValueError, match=r"The folder .*none does not exist either"):
        open_rows(str(tmp_path / "none" / "a.parquet"))
    with pytest.raises(ValueError, match=r"data.val_files names no file"):
        open_rows([], key="data.val_files")


def test_a_file_that_is_replaced_during_a_run_keeps_its_fingerprint(tmp_path: Path) -> None:
    """Its rows are those that were opened: a checkpoint must not take the new file for them."""
    file = open_file(write(tmp_path / "a.parquet", ROWS))
    first = file.fingerprint
    assert file[0]
    Path(write(tmp_path / "b.parquet", ROWS[:1])).replace(tmp_path / "a.parquet")
    assert file.fingerprint == first != open_file(str(tmp_path / "a.parquet")).fingerprint
    (tmp_path / "a.parquet").unlink()
    assert file.fingerprint == first


def test_a_fingerprint_follows_the_content(tmp_path: Path) -> None:
    first = open_file(write(tmp_path / "a.parquet", ROWS)).fingerprint
    assert open_file(write(tmp_path / "b.parquet", ROWS)).fingerprint == first
    assert (
        open_file(write(tmp_path / "a.parquet", [*ROWS[:-1], {**ROWS[-1], "prompt": "9+9="}])).fingerprint
        != first
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.dictionaries(st.text(max_size=6), json_values, max_size=4), min_size=1, max_size=6),
    st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_rows_survive(tmp_path: Path, rows: list[dict], lines: bool) -> None:
    assert list(open_rows(write(tmp_path / ("a.jsonl" if lines else "a.json"), rows))) == rows


@given(st.binary(max_size=200), st.sampled_from(["a.parquet", "a.json", "a.jsonl"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_never_give_a_raw_traceback(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    try:
        list(open_rows(str(tmp_path / name)))
    except ValueError as error:
        assert name in str(error)


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_in_parquet_is_read_or_refused(tmp_path: Path, place: int, flip: int) -> None:
    content = bytearray(Path(write(tmp_path / "good.parquet", ROWS)).read_bytes())
    content[place % len(content)] ^= flip
    (tmp_path / "bad.parquet").write_bytes(content)
    try:
        list(open_rows(str(tmp_path / "bad.parquet")))
    except ValueError as error:
        assert "bad.parquet" in str(error)
