"""Read rows of parquet, json and jsonl files, local or at any fsspec address.

Opening a file is cheap: of parquet only the footer is read, and the Arrow table is decoded at the first row;
of jsonl an index of line positions is built. Only requested rows become Python objects. JSON is parsed line
by line and not by Arrow, whose type inference refuses columns of mixed type and turns date-like strings into
dates.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strop.data.fetch import fetch, row_format
from strop.data.json_rows import (
    RepeatedKey,
    as_row,
    has_escaped_surrogate,
    parse,
    repeated,
    repeated_in_array,
    text_of,
)

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
RowSource = Sequence[Any]  # `FileRows`, or a user's data set of dictionaries or finished items
FINGERPRINT_BYTES = 1 << 16  # of each end of a file
PARQUET_BATCH = 8192  # rows
NESTED_BATCH = 64  # rows, of which a list column may hold 32 MiB each


class RowFile(ABC):
    """The rows of one file, by index."""

    def __init__(self, address: str, path: Path):
        self.address = address
        self.path = path
        self._fingerprint = _fingerprint(path)

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

    @property
    def stem(self) -> str:
        """The file name without its extension."""
        return Path(self.address.rpartition("/")[2]).stem

    def fingerprint(self) -> str:
        """Return a hash of the file as it was opened. Rows are those of that file, whatever takes its place
        during a run."""
        return self._fingerprint


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
            raise _corrupt(address, "parquet", error) from error
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
            raise _corrupt(self.address, "parquet", error, row) from error
        return rows[0]

    def column(self, name: str) -> Iterator[object]:
        if name not in self.columns:
            yield from [None] * len(self)
            return
        for batch in self._read([name]).to_batches(max_chunksize=PARQUET_BATCH):
            try:
                yield from batch.column(0).to_pylist(maps_as_pydicts="lossy")
            except (ValueError, OverflowError) as error:
                raise _corrupt(self.address, f"parquet (column {name!r})", error) from error

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
            raise _corrupt(self.address, "parquet", error) from error

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


class JsonLinesFile(RowFile):
    """One JSON object per line. Every line is parsed when the file is opened, so that errors are found
    early."""

    def __init__(self, address: str, path: Path):
        super().__init__(address, path)
        self._descriptor: int | None = None
        self._size = path.stat().st_size
        self._spans = _line_spans(path)
        seen: dict[str, None] = {}
        for row in range(len(self)):
            names = self[row].keys()
            if not names <= seen.keys():
                seen.update(dict.fromkeys(names))
        self.columns = list(seen)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, row: int) -> Row:
        # Not mapped: a file that is written again in place would end the process with SIGBUS.
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
        start, end = self._spans[row].tolist()
        line = os.pread(self._descriptor, end - start, start)
        size = os.fstat(self._descriptor).st_size
        if size != self._size:
            raise ValueError(
                f"{self.address} had {self._size} bytes when it was opened and has {size} now, so its rows "
                "are lost. Start again, and write new data to another file."
            )
        try:
            value = parse(text_of(line))
        except RepeatedKey as error:
            raise repeated(f"{self.address}, row {row} (line {self._line(start)})", error) from error
        except (ValueError, RecursionError) as error:
            raise _corrupt(self.address, "json", error, row) from error
        return as_row(value, self.address, row, has_escaped_surrogate(line))

    def _line(self, position: int) -> int:
        """The number of the line that begins at a byte."""
        with self.path.open("rb") as file:
            return next(number for number, line in enumerate(file, 1) if file.tell() > position)

    def column(self, name: str) -> Iterator[object]:
        for row in range(len(self)):
            yield self[row].get(name)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_descriptor": None}


class JsonArrayFile(RowFile):
    """One JSON array of objects."""

    def __init__(self, address: str, path: Path):
        super().__init__(address, path)
        try:
            data = path.read_bytes()
            text = text_of(data)
            values = parse(text)
        except RepeatedKey as error:
            raise repeated_in_array(text, address) from error
        except (ValueError, RecursionError) as error:
            raise _corrupt(address, "json", error) from error
        risky = has_escaped_surrogate(data)
        self._rows = [as_row(value, address, row, risky) for row, value in enumerate(values)]
        self.columns = list(dict.fromkeys(chain.from_iterable(self._rows)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Row:
        return self._rows[row]

    def column(self, name: str) -> Iterator[object]:
        for row in self._rows:
            yield row.get(name)


class FileRows(Sequence[Row]):
    """The rows of several files, concatenated."""

    def __init__(self, files: Sequence[RowFile]):
        self.files = list(files)
        self.counts = [len(file) for file in self.files]
        self._ends: list[int] = np.cumsum(self.counts).tolist()

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, index: Any) -> Any:
        file, row = self.place(index)
        return file[row]

    def place(self, index: int) -> tuple[RowFile, int]:
        """Return the file of a row, and the row's index in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of {len(self)}.")
        number = bisect.bisect_right(self._ends, index)
        return self.files[number], index - (self._ends[number] - self.counts[number])

    def where(self, index: int) -> str:
        """Return the file and row number of a row, for messages; rows count from 0."""
        file, row = self.place(index)
        return f"{file.address}, row {row}"

    def column(self, name: str) -> Iterator[object]:
        """Yield the values of one column over all files."""
        for file in self.files:
            yield from file.column(name)

    @property
    def columns(self) -> list[str]:
        """Columns that every file has, in the order of the first file."""
        if not self.files:
            return []
        shared = set(self.files[0].columns).intersection(*(file.columns for file in self.files))
        return [name for name in self.files[0].columns if name in shared]

    def table(self) -> pyarrow.Table:
        """Return all rows as one Arrow table; a column that a file lacks is null."""
        import pyarrow

        try:
            return pyarrow.concat_tables([file.table() for file in self.files], promote_options="permissive")
        except pyarrow.ArrowException as error:
            names = ", ".join(file.address for file in self.files)
            raise ValueError(f"{names} cannot be joined: {' '.join(str(error).split())[:200]}") from error

    def fingerprint(self) -> str:
        """Return a hash that changes with any of the files."""
        return hashlib.sha256("".join(file.fingerprint() for file in self.files).encode()).hexdigest()[:16]


def addresses(files: str | Sequence[str] | None, *, key: str = "data.train_files") -> list[str]:
    """Return one path or a list of paths as a list."""
    if isinstance(files, str | os.PathLike):
        return [str(files)]
    listed = list(files or [])
    if not listed:
        raise ValueError(f"{key} names no file. Set it to one path or a list of them.")
    return [str(file) for file in listed]


def open_file(address: str) -> RowFile:
    """Open one file by its extension; ValueError if it is missing, corrupt or empty."""
    path = fetch(address)
    kind = row_format(address, path)
    if path.stat().st_size == 0:
        raise ValueError(f"{address} is empty (0 bytes).")
    if kind == ".parquet":
        opened: RowFile = ParquetFile(address, path)
    elif _first_byte(path) == b"[":
        opened = JsonArrayFile(address, path)
    else:
        opened = JsonLinesFile(address, path)
    if not len(opened):
        raise ValueError(f"{address} holds no rows.")
    return opened


def open_rows(files: str | Sequence[str] | None, *, key: str = "data.train_files") -> FileRows:
    """Open all files of a setting; `key` is the setting, for messages."""
    return FileRows([open_file(address) for address in addresses(files, key=key)])


def count_rows(files: str | Sequence[str]) -> int:
    """Return the number of rows of files; only parquet footers and line ends are read."""
    total = 0
    for address in addresses(files):
        path = fetch(address)
        if row_format(address, path) == ".parquet" or (path.stat().st_size and _first_byte(path) == b"["):
            total += len(open_file(address))
        else:
            total += len(_line_spans(path))
    return total


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        while chunk := file.read(4096):
            text = chunk.removeprefix(b"\xef\xbb\xbf").lstrip()
            if text:
                return text[:1]
    return b""


def _line_spans(path: Path) -> NDArray[np.int64]:
    """Return the start and end of every line that is not blank."""
    spans = []
    position = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                spans.append((position, position + len(line)))
            position += len(line)
    return np.asarray(spans, dtype=np.int64).reshape(-1, 2)


def _fingerprint(path: Path) -> str:
    """A hash that changes with the file; of its size and both ends (a parquet footer lists all pages)."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(FINGERPRINT_BYTES))
        file.seek(max(0, size - FINGERPRINT_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def _corrupt(address: str, kind: str, error: BaseException, row: int | None = None) -> ValueError:
    where = address if row is None else f"{address}, row {row}"
    reason = " ".join(str(error).split())[:300]
    return ValueError(f"{where} cannot be read as {kind}: {type(error).__name__}: {reason}")
