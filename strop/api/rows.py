"""Data that is given as objects. It is written to a file in the folder of the run, which the run reads.

    a list of dicts, or any iterable of them; datasets.Dataset; a pandas frame; an Arrow table;
    the path of a parquet, json or jsonl file, or a list of paths

Rows of reinforcement learning are plain: a prompt (text or messages) and any other columns. Columns that the
data schema does not know (`strop/data/schema.py`) go into `extra_info`, from which reward functions get them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from strop.data.fetch import FORMATS
from strop.data.files import FileRows, open_rows
from strop.data.schema import require_column
from strop.rewards.base import plain_value
from strop.rewards.signatures import ROW_FACTS

if TYPE_CHECKING:
    import pyarrow

Rows: TypeAlias = Iterable[Mapping[str, object]]
"""Rows as objects: anything that yields mappings. Data sets of Hugging Face do; frames are converted."""
Data: TypeAlias = Rows | str | Path | Sequence[str | Path]
PlainRow: TypeAlias = dict[str, object]

SCHEMA_COLUMNS = ("data_source", "datasource", "reward_model", "extra_info", "ability", "agent_name")
DEFAULT_SOURCE = "custom"
"""data_source of rows that name none."""
NAME_DIGITS = 12


@dataclass(frozen=True)
class RowKeys:
    """Names of columns with a meaning of their own."""

    prompt: str = "prompt"
    known: tuple[str, ...] = ()
    """Further columns that the configuration names: the label, images, videos."""
    label: str | None = None
    """The column with the ground truth, if the configuration names one."""

    @property
    def all(self) -> set[str]:
        return {self.prompt, *self.known, *SCHEMA_COLUMNS}


def is_files(data: object) -> bool:
    """Whether the data is given as the path of a file, or a list of paths."""
    if isinstance(data, str | os.PathLike):
        return True
    if not isinstance(data, list | tuple) or not data:
        return False
    return all(isinstance(item, str | os.PathLike) and str(item).endswith(FORMATS) for item in data)


def paths_of(data: object) -> str | list[str]:
    """One path or several; relative ones stay so, as on a command line."""
    if isinstance(data, str | os.PathLike):
        return str(data)
    return [str(item) for item in cast(Sequence[str], data)]


def read_rows(data: object, name: str) -> list[PlainRow]:
    """The rows as dictionaries of plain values; `name` is the argument, for messages."""
    found: list[PlainRow] = []
    for index, row in enumerate(_iterate(data, name)):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"{name}: row {index} is a {type(row).__name__}; a row is a dict with columns as keys, for "
                'instance {"prompt": "2+3=", "answer": "5"}.'
            )
        found.append({str(column): _plain(value) for column, value in row.items()})
    if not found:
        raise ValueError(f"{name} holds no rows.")
    return found


def _iterate(data: object, name: str) -> Iterable[object]:
    to_dict = getattr(data, "to_dict", None)
    if callable(to_dict) and hasattr(data, "iloc"):  # a pandas frame
        return cast("Iterable[object]", to_dict("records"))
    for name_of_method in ("to_pylist", "to_dicts"):  # an Arrow table, a polars frame
        method = getattr(data, name_of_method, None)
        if callable(method):
            return cast("Iterable[object]", method())
    if isinstance(data, Mapping):
        raise ValueError(
            f"{name} is a mapping with the keys {', '.join(map(str, list(data)[:8]))}; it must be rows. Of a "
            f"data set with several splits give one: {name}=data['train']."
        )
    if isinstance(data, bytes) or not isinstance(data, Iterable):
        raise ValueError(
            f"{name} is a {type(data).__name__}; it must be rows (a list of dicts, a data set, a frame) or "
            f"the path of a file that ends in {', '.join(FORMATS)}."
        )
    return data


def _plain(value: object) -> object:
    """Numbers and arrays of numpy as Python's; a missing value of a frame (NaN) as None."""
    value = plain_value(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def columns_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The columns of all rows, in the order of their first occurrence."""
    seen: dict[str, None] = {}
    for row in rows:
        seen.update(dict.fromkeys(row))
    return list(seen)


def reward_columns(rows: Sequence[Mapping[str, object]]) -> set[str]:
    """What a reward function may ask for by name: the columns, and the keys of extra_info."""
    names = set(columns_of(rows))
    for row in rows:
        extra = row.get("extra_info")
        if isinstance(extra, Mapping):
            names.update(map(str, extra))
    return names


def prompt_rows(rows: Sequence[PlainRow], keys: RowKeys, name: str) -> list[PlainRow]:
    """Rows of the schema of reinforcement learning."""
    columns = columns_of(rows)
    require_column(columns, keys.prompt, setting="prompt_key", where=name)
    others = [column for column in columns if column not in keys.all and column != "ground_truth"]
    return [_prompt_row(row, keys, others) for row in rows]


def _prompt_row(row: PlainRow, keys: RowKeys, others: Sequence[str]) -> PlainRow:
    made = {column: value for column, value in row.items() if column in keys.all}
    made.setdefault("data_source", row.get("datasource") or DEFAULT_SOURCE)
    if "reward_model" not in row:
        made["reward_model"] = {"style": "function"}
        if "ground_truth" in row:
            made["reward_model"] = {"style": "function", "ground_truth": row["ground_truth"]}
    given = row.get("extra_info")
    extra: PlainRow = dict(given) if isinstance(given, Mapping) else {}
    for column in others:
        extra[column] = row.get(column)
    facts: PlainRow = {}
    if isinstance(row.get(keys.prompt), str):
        facts["text_prompt"] = True
    null_columns = [column for column in others if row.get(column) is None]
    if null_columns:
        facts["null_columns"] = null_columns
    if facts:
        extra[ROW_FACTS] = facts
    if extra:
        made["extra_info"] = extra
    return made


def needs_conversion(files: FileRows, keys: RowKeys) -> bool:
    """Whether files have columns that a reward function could not get from them."""
    return any(column not in keys.all for file in files.files for column in file.columns)


def open_files(data: object, name: str) -> FileRows:
    """The files of `data`."""
    return open_rows(paths_of(data), key=name)


def write_rows(rows: Sequence[PlainRow], folder: Path, name: str) -> Path:
    """Write rows to `folder`, under a name that changes with their content; returns the file.

    Parquet; where a column has values of several types (also integers and floats) or only empty dicts, which
    parquet cannot hold, one JSON object per line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{name}.{os.getpid()}.part"
    try:
        suffix = _write_parquet(rows, part) or _write_json(rows, part, name)
        digest = hashlib.sha256(part.read_bytes()).hexdigest()[:NAME_DIGITS]
        target = folder / f"{name}-{digest}{suffix}"
        os.replace(part, target)
        return target.absolute()
    finally:
        part.unlink(missing_ok=True)


def _write_parquet(rows: Sequence[PlainRow], file: Path) -> str | None:
    """The suffix of the format; None if Arrow has no type for a column, or parquet cannot hold it."""
    import pyarrow
    import pyarrow.parquet

    arrays = {}
    for column in columns_of(rows):
        array = _arrow_column(rows, column)
        if array is None:
            return None
        arrays[column] = array
        if pyarrow.types.is_null(array.type):  # readers would not find the column
            arrays[column] = array.cast(pyarrow.string())
    try:
        pyarrow.parquet.write_table(pyarrow.table(arrays), file)
    except pyarrow.ArrowNotImplementedError:  # a column of empty dicts
        return None
    return ".parquet"


def _arrow_column(rows: Sequence[PlainRow], column: str) -> pyarrow.Array | None:
    """A column as an array of one type; None if its values have several."""
    import pyarrow

    values = [row.get(column) for row in rows]
    try:
        array = pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError):
        return None
    return None if _loses_integers(values, array.type) else array


def _loses_integers(values: Sequence[Any], kind: pyarrow.DataType) -> bool:
    """Whether a column of this type, or a part of it, has floats in the place of integers: 1.0 for 1."""
    import pyarrow

    present = [value for value in values if value is not None]
    if pyarrow.types.is_floating(kind):
        return any(isinstance(value, int) for value in present)
    if pyarrow.types.is_list(kind):
        return _loses_integers([item for value in present for item in value], kind.value_type)
    if pyarrow.types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return any(
            _loses_integers([value.get(field.name) for value in present], field.type) for field in fields
        )
    return False


def _write_json(rows: Sequence[PlainRow], file: Path, name: str) -> str:
    with file.open("w", encoding="utf-8") as lines:
        for index, row in enumerate(rows):
            for column, value in row.items():
                try:
                    json.dumps(value)
                except (TypeError, ValueError) as error:
                    others = [other for other in columns_of(rows) if other != column]
                    mixed = [repr(other) for other in others if _arrow_column(rows, other) is None]
                    which = f" {', '.join(mixed)} does." if mixed else ""
                    raise ValueError(
                        f"{name}: row {index}, column {column!r} cannot be written to a file: {error}. Rows "
                        "hold text, numbers, lists and dicts of them; bytes only if no column mixes types, "
                        f"for instance integers and floats.{which}"
                    ) from error
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    return ".jsonl"
