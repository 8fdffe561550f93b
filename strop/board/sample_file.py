"""One file of samples: opened, narrowed down to rows, read. Whatever is wrong with it becomes `Damaged`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from strop.board.find import NotFound

GROUP_FACTS = [
    "group",
    "index",
    "data_source",
    "score",
    "zero_variance",
    "failed",
    "truncated",
    "response_tokens",
]
"""Columns that describe groups."""
SAMPLE_FACTS = [
    "group",
    "sample",
    "index",
    "data_source",
    "score",
    "group_mean",
    "zero_variance",
    "failed",
    "truncated",
    "advantage",
    "finish",
    "version",
    "prompt_tokens",
    "response_tokens",
    "num_turns",
    "tool_results",
    "ground_truth",
    "reported",
    "turns",
]
TEXTS = ("prompt", "response", "ground_truth")

SHOWN: dict[str, Any] = {
    "all": None,
    "mixed": ~pc.field("zero_variance_max"),
    "zero_variance": pc.field("zero_variance_max"),
    "truncated": pc.field("truncated_sum") > 0,
    "failed": pc.field("failed_sum") > 0,
}
"""Which groups to show."""
SORTED = {
    "order": ("group", "ascending"),
    "worst": ("score_mean", "ascending"),
    "best": ("score_mean", "descending"),
    "spread": ("score_stddev", "descending"),
    "longest": ("response_tokens_max", "descending"),
}
_SUMS = [
    ("index", "min"),
    ("data_source", "min"),
    ("score", "mean"),
    ("score", "stddev"),
    ("score", "min"),
    ("score", "max"),
    ("zero_variance", "max"),
    ("failed", "sum"),
    ("truncated", "sum"),
    ("response_tokens", "mean"),
    ("response_tokens", "max"),
    ("row", "min"),
    ("row", "count"),
]


class Damaged(ValueError):
    """A file that cannot be read, by its name."""


@contextmanager
def opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            missing = sorted({*SAMPLE_FACTS, *TEXTS, "ids"} - set(file.schema_arrow.names))
            if missing:
                raise Damaged(f"{path.name} has no column {', '.join(missing)}: another program or version wrote it.")
            yield file
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"{path.name} is damaged: {str(error)[:200]}") from error


NO_GROUPS = pa.table({"group": pa.array([], pa.int64())})


def groups_of(file: pq.ParquetFile, show: str, sort: str, search: str) -> pa.Table:
    """One row per group, those asked for, in the order asked for."""
    if not may_have(file, show):
        return NO_GROUPS
    wanted = _groups_with(file, search) if search else None
    if wanted is not None and not wanted:
        return NO_GROUPS
    table = file.read(GROUP_FACTS, use_threads=False)
    table = table.append_column("row", pa.array(range(table.num_rows), pa.int64()))
    if wanted is not None:
        table = table.filter(pc.is_in(table["group"], pa.array(sorted(wanted), pa.int64())))
    groups = table.group_by("group", use_threads=False).aggregate(_SUMS)
    if SHOWN[show] is not None:
        groups = groups.filter(SHOWN[show])
    key, order = SORTED[sort]
    return groups.sort_by([(key, order), ("group", "ascending")])


def _groups_with(file: pq.ParquetFile, text: str) -> set[int]:
    """Groups in which a prompt, an answer or the truth has these characters, large or small. Row groups one at a time, so that
    no more text than of one is in memory."""
    found: set[int] = set()
    for piece in range(file.num_row_groups):
        table = file.read_row_group(piece, ["group", *TEXTS], use_threads=False)
        hits = [pc.fill_null(pc.match_substring(table[name], text, ignore_case=True), False) for name in TEXTS]
        found.update(table["group"].filter(pc.or_(pc.or_(hits[0], hits[1]), hits[2])).to_pylist())
    return found


def may_have(file: pq.ParquetFile, show: str) -> bool:
    """What the statistics of the file say without reading it: False where no row can be of this kind."""
    if show not in ("zero_variance", "truncated", "failed"):
        return True
    pieces = [_statistics(file, piece, show) for piece in range(file.num_row_groups)]
    return any(found is None or found.max for found in pieces)


def pieces_with(file: pq.ParquetFile, column: str, value: int) -> list[int]:
    """Row groups in which the column may have this value."""
    wanted = []
    for piece in range(file.num_row_groups):
        found = _statistics(file, piece, column)
        if found is None or found.min <= value <= found.max:
            wanted.append(piece)
    return wanted


def rows_of(file: pq.ParquetFile, group: int, sample: int | None = None) -> list[int]:
    """Row numbers of a group, or of one sample of it."""
    rows: list[int] = []
    starts = _starts(file)
    for piece in pieces_with(file, "group", group):
        table = file.read_row_group(piece, ["group", "sample"], use_threads=False)
        hits = pc.equal(table["group"], group)
        if sample is not None:
            hits = pc.and_(hits, pc.equal(table["sample"], sample))
        rows += [starts[piece] + place for place in pc.indices_nonzero(hits).to_pylist()]
    if not rows:
        raise NotFound(f"No group {group}" + ("" if sample is None else f" with a sample {sample}") + " was kept.")
    return rows


def read_rows(file: pq.ParquetFile, rows: Sequence[int], columns: Sequence[str]) -> pa.Table:
    """These rows, in this order, reading only the row groups they are in."""
    starts = _starts(file)
    places: dict[int, list[tuple[int, int]]] = {}
    for position, row in enumerate(rows):
        piece = max(i for i, start in enumerate(starts) if start <= row)
        places.setdefault(piece, []).append((position, row - starts[piece]))
    tables, order = [], []
    for piece, found in places.items():
        tables.append(file.read_row_group(piece, list(columns), use_threads=False).take([place for _, place in found]))
        order += [position for position, _ in found]
    joined = pa.concat_tables(tables)
    return joined.take(sorted(range(len(order)), key=order.__getitem__))


def _starts(file: pq.ParquetFile) -> list[int]:
    """The first row of each row group."""
    starts, row = [], 0
    for piece in range(file.num_row_groups):
        starts.append(row)
        row += file.metadata.row_group(piece).num_rows
    return starts


def _statistics(file: pq.ParquetFile, piece: int, column: str) -> Any:
    facts = file.metadata.row_group(piece)
    place = next(i for i in range(facts.num_columns) if facts.column(i).path_in_schema == column)
    found = facts.column(place).statistics
    return found if found is not None and found.has_min_max else None
