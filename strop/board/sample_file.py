"""Read one file of samples: select groups and rows. An unreadable file is a DamagedSampleFile error."""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from strop.board.run_index import NotFound
from strop.run.sample_table import IMAGES, SAMPLE_SCHEMA, TOKEN_TABLES

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
LISTS = ("ids", "tokens", "role", "rollout_log_probs", *TOKEN_TABLES)
"""Columns with a value for each token."""
IMAGE_FACTS = ("width", "height", "video")

SHOWN: dict[str, pc.Expression | None] = {
    "all": None,
    "mixed": ~pc.field("zero_variance_max"),
    "zero_variance": pc.field("zero_variance_max"),
    "truncated": pc.field("truncated_sum") > 0,
    "failed": pc.field("failed_sum") > 0,
}
"""Filters of groups."""
SORTED = {
    "order": ("group", "ascending"),
    "worst": ("score_mean", "ascending"),
    "best": ("score_mean", "descending"),
    "spread": ("score_stddev", "descending"),
    "longest": ("response_tokens_max", "descending"),
}
_AGGREGATES = [
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


class DamagedSampleFile(ValueError):
    """A sample file that cannot be read."""


@contextmanager
def open_samples(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a sample file; raises DamagedSampleFile where it, or its data, cannot be read."""
    try:
        with pq.ParquetFile(path) as file:
            missing = sorted({*SAMPLE_FACTS, *TEXTS, "ids"} - set(file.schema_arrow.names))
            if missing:
                raise DamagedSampleFile(
                    f"{path.name} has no column {', '.join(missing)}: another program or version wrote it."
                )
            strange = [field.name for field in file.schema_arrow if not _is_as_written(field)]
            if strange:
                raise DamagedSampleFile(
                    f"{path.name} has other values in {', '.join(strange)}: another program or version wrote "
                    "it."
                )
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DamagedSampleFile(f"{path.name} is damaged: {str(error)[:200]}") from error


def _is_as_written(field: pa.Field) -> bool:
    """Whether a column has the type that a run writes."""
    if field.name in LISTS:
        return bool(pa.types.is_list(field.type))
    if field.name in SAMPLE_SCHEMA.names:
        return bool(field.type == SAMPLE_SCHEMA.field(field.name).type)
    return True


NO_GROUPS = pa.table({"group": pa.array([], pa.int64())})


def groups_of(file: pq.ParquetFile, show: str, sort: str, search: str) -> pa.Table:
    """One row per group that matches filter and search, sorted."""
    if not may_have(file, show):
        return NO_GROUPS
    wanted: set[int] | None = None
    if search:
        wanted = _groups_with(file, search)
        if not wanted:
            return NO_GROUPS
    table = file.read(GROUP_FACTS, use_threads=False)
    table = table.append_column("row", pa.array(range(table.num_rows), pa.int64()))
    if wanted is not None:
        table = table.filter(pc.is_in(table["group"], pa.array(sorted(wanted), pa.int64())))
    groups = table.group_by("group", use_threads=False).aggregate(_AGGREGATES)
    if SHOWN[show] is not None:
        groups = groups.filter(SHOWN[show])
    key, order = SORTED[sort]
    return groups.sort_by([(key, order), ("group", "ascending")])


def _groups_with(file: pq.ParquetFile, text: str) -> set[int]:
    """Groups whose prompt, response or ground truth contains a text in upper or lower case. Only one row
    group is in memory at a time."""
    found: set[int] = set()
    for row_group in range(file.num_row_groups):
        table = file.read_row_group(row_group, ["group", *TEXTS], use_threads=False)
        for name in TEXTS:
            hits = pc.fill_null(pc.match_substring(table[name], text, ignore_case=True), False)
            found.update(table["group"].filter(hits).to_pylist())
    return found


def may_have(file: pq.ParquetFile, show: str) -> bool:
    """False if the statistics of the file say that no row matches the filter."""
    if show not in ("zero_variance", "truncated", "failed"):
        return True
    for row_group in range(file.num_row_groups):
        statistics = _statistics(file, row_group, show)
        if statistics is None or statistics.max:
            return True
    return False


def row_groups_with(file: pq.ParquetFile, column: str, value: int) -> list[int]:
    """Row groups in which the column may have this value."""
    found: list[int] = []
    for row_group in range(file.num_row_groups):
        statistics = _statistics(file, row_group, column)
        if statistics is None or statistics.min <= value <= statistics.max:
            found.append(row_group)
    return found


def rows_of(file: pq.ParquetFile, group: int, sample: int | None = None) -> list[int]:
    """Row numbers of a group, or of one sample of it."""
    rows: list[int] = []
    starts = _starts(file)
    for row_group in row_groups_with(file, "group", group):
        table = file.read_row_group(row_group, ["group", "sample"], use_threads=False)
        hits = pc.equal(table["group"], group)
        if sample is not None:
            hits = pc.and_(hits, pc.equal(table["sample"], sample))
        for position in pc.indices_nonzero(hits).to_pylist():
            rows.append(starts[row_group] + position)
    if not rows:
        missing = f"group {group}"
        if sample is not None:
            missing += f" with a sample {sample}"
        raise NotFound(f"No {missing} was kept.")
    return rows


def read_rows(file: pq.ParquetFile, rows: Sequence[int], columns: Sequence[str]) -> pa.Table:
    """These rows in this order. Only the row groups that hold them are read."""
    starts = _starts(file)
    positions: dict[int, list[int]] = {}
    inner_rows: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        row_group = bisect_right(starts, row) - 1
        positions.setdefault(row_group, []).append(position)
        inner_rows.setdefault(row_group, []).append(row - starts[row_group])
    tables: list[pa.Table] = []
    order: list[int] = []
    for row_group, inner in inner_rows.items():
        tables.append(file.read_row_group(row_group, list(columns), use_threads=False).take(inner))
        order += positions[row_group]
    joined = pa.concat_tables(tables)
    return joined.take(sorted(range(len(order)), key=order.__getitem__))


def images_of(file: pq.ParquetFile, rows: Sequence[int]) -> tuple[list[dict[str, object]], list[list[int]]]:
    """The images of these rows of a group, each once, as data URLs; and for each row the places of its images
    in that list."""
    if IMAGES not in file.schema_arrow.names:
        return [], [[] for _ in rows]
    shown: dict[str, dict[str, object]] = {}
    own: list[list[int]] = []
    for images in read_rows(file, rows, [IMAGES])[IMAGES].to_pylist():
        places = []
        for image in images or ():
            facts = shown.setdefault(
                image["digest"], {**{name: image[name] for name in IMAGE_FACTS}, "source": None}
            )
            if image["jpeg"] is not None:
                facts["source"] = f"data:image/jpeg;base64,{base64.b64encode(image['jpeg']).decode()}"
            places.append(list(shown).index(image["digest"]))
        own.append(places)
    return list(shown.values()), own


def _starts(file: pq.ParquetFile) -> list[int]:
    """The first row of each row group."""
    starts: list[int] = []
    row = 0
    for row_group in range(file.num_row_groups):
        starts.append(row)
        row += file.metadata.row_group(row_group).num_rows
    return starts


def _statistics(file: pq.ParquetFile, row_group: int, column: str) -> pq.Statistics | None:
    """Minimum and maximum of a column in a row group; None if the file does not hold them."""
    metadata = file.metadata.row_group(row_group)
    columns = [metadata.column(index) for index in range(metadata.num_columns)]
    names = [found.path_in_schema for found in columns]
    statistics = columns[names.index(column)].statistics
    if statistics is None or not statistics.has_min_max:
        return None
    return statistics
