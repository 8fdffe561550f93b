"""What `strop generate` answers: rows of files, or of a benchmark as it is published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strop.catalog import DATASETS
from strop.config.schema.inference import Generation
from strop.data.files import Row, open_rows
from strop.data.make import published
from strop.data.schema import require_column


@dataclass(frozen=True)
class Questions:
    """The rows to answer."""

    rows: Sequence[Row]
    fingerprint: str
    table: Callable[[], Any]


def open_questions(config: Generation) -> Questions:
    """The input, with its columns made sure of."""
    data = config.data
    files = open_rows(data.path, key="data.path")
    if data.benchmark:
        made = published(data.benchmark, files)
        return Questions(made, files.fingerprint(), lambda: _table_of(made))
    for file in files.files:
        if data.prompt_key not in file.columns and (name := _known_as(file.columns)):
            raise ValueError(
                f"{file.address} has no column {data.prompt_key!r}. Its columns are those of {name} as it is published: set "
                f"data.benchmark={name}."
            )
        require_column(file.columns, data.prompt_key, setting="data.prompt_key", where=file.address)
    return Questions(files, files.fingerprint(), files.table)


def _known_as(columns: Sequence[str]) -> str | None:
    """The published data set that has these columns."""
    fitting = [name for name in DATASETS.names() if set(DATASETS.entry(name).facts["columns"]) <= set(columns)]
    return fitting[0] if fitting else None


def _table_of(rows: Sequence[Row]) -> Any:
    import pyarrow

    return pyarrow.Table.from_pylist(list(rows))
