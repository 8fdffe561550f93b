"""The rows of one file, by index: what files of all formats have, and parquet files."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
FINGERPRINT_BYTES = 1 << 16  # of each end of a file
PARQUET_BATCH = 8192  # rows
NESTED_BATCH = 64  # rows, of which a list column may hold 32 MiB each


class RowFile(ABC):
    """The rows of one file, by index."""

    def __init__(self, address: str, path: Path):
        self.address = address
        self.path = path
        self.stem = Path(address.rpartition("/")[2]).stem
        """The file name without its extension."""
        self.fingerprint = _fingerprint(path)
        """A hash of the file as it was opened. Rows are those of that file, whatever takes its place during a
        run."""

    columns: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> Row: ...

    @abstractmethod
    def column(self, name: str) -> Iterator[object]:
        """Yield the values of one column; None for rows without it."""

    def table(self) -> pyarrow.Table:
        """Return all rows as one Arrow table."""
        import pyarrow

        columns = {}
        for name in self.columns:
            try:
                columns[name] = pyarrow.array(list(self.column(name)))
            except (pyarrow.ArrowException, OverflowError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(
                    f"{self.address}: the column {name!r} has values of different types ({reason}), which a "
                    "parquet file cannot hold. Write those of all rows in one way."
                ) from error
        return pyarrow.table(columns)


class ParquetFile(RowFile):
    """A parquet file; its table is read at the first row."""

    def __init__(self, address: str, path: Path):
        super().__init__(address, path)
        import pyarrow
        import pyarrow.parquet

        try:
            self._rows = int(pyarrow.parquet.read_metadata(path).num_rows)
            if self._rows < 0:
                raise ValueError(f"it says that it has {self._rows} rows")
            self.columns = list(pyarrow.parquet.read_schema(path).names)
        except (pyarrow.ArrowException, OSError, ValueError, LookupError) as error:
            raise corrupt(address, "parquet", error) from error
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise ValueError(f"{address} has several columns {twice[0]!r}. Rename or remove all but one.")
        self._table: pyarrow.Table | None = None

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Row:
        if self._table is None:
            self._table = self._read(None)
        try:
            rows: list[Row] = self._table.slice(row, 1).to_pylist(maps_as_pydicts="lossy")
        except (ValueError, OverflowError) as error:  # a date that Python has not
            raise corrupt(self.address, "parquet", error, row) from error
        return rows[0]

    def column(self, name: str) -> Iterator[object]:
        if name not in self.columns:
            yield from [None] * len(self)
            return
        for batch in self._read([name]).to_batches(max_chunksize=PARQUET_BATCH):
            try:
                yield from batch.column(0).to_pylist(maps_as_pydicts="lossy")
            except (ValueError, OverflowError) as error:
                raise corrupt(self.address, f"parquet (column {name!r})", error) from error

    def table(self) -> pyarrow.Table:
        return self._read(None)

    def _read(self, columns: list[str] | None) -> pyarrow.Table:
        import pyarrow
        import pyarrow.parquet

        try:
            try:
                table = pyarrow.parquet.read_table(
                    self.path, columns=columns, memory_map=True, partitioning=None
                )
            except pyarrow.ArrowNotImplementedError:
                # Arrow decodes a row group at once, and refuses lists of more than 2 GiB (images, messages).
                table = self._read_in_batches(columns)
            table.validate(full=True)  # else invalid UTF-8 raises at its row, in the middle of a run
            kinds = pyarrow.schema(map(_in_microseconds, table.schema))
            return table if table.schema.equals(kinds) else table.cast(kinds, safe=False)
        except (pyarrow.ArrowException, OSError, ValueError, LookupError) as error:
            raise corrupt(self.address, "parquet", error) from error

    def _read_in_batches(self, columns: list[str] | None) -> pyarrow.Table:
        import pyarrow
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self.path, memory_map=True) as file:
            return pyarrow.Table.from_batches(list(file.iter_batches(NESTED_BATCH, columns=columns)))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_table": None}  # worker processes read the file themselves


def _in_microseconds(field: pyarrow.Field) -> pyarrow.Field:
    """A column with times in microseconds. Python's have no nanoseconds, which pandas writes."""
    import pyarrow

    kind = field.type
    types = pyarrow.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return field.with_type(pyarrow.timestamp("us", kind.tz))
    if types.is_duration(kind) and kind.unit == "ns":
        return field.with_type(pyarrow.duration("us"))
    if types.is_time64(kind):
        return field.with_type(pyarrow.time64("us"))
    if types.is_list(kind):
        return field.with_type(pyarrow.list_(_in_microseconds(kind.value_field)))
    if types.is_struct(kind):
        return field.with_type(pyarrow.struct(list(map(_in_microseconds, kind))))
    return field


def _fingerprint(path: Path) -> str:
    """A hash that changes with the file; of its size and both ends (a parquet footer lists all pages)."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(FINGERPRINT_BYTES))
        file.seek(max(0, size - FINGERPRINT_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def corrupt(address: str, kind: str, error: BaseException, row: int | None = None) -> ValueError:
    where = address if row is None else f"{address}, row {row}"
    reason = " ".join(str(error).split())[:300]
    return ValueError(f"{where} cannot be read as {kind}: {type(error).__name__}: {reason}")
