"""Read rows of parquet, json and jsonl files, local or at any fsspec address.

Opening a file is cheap: of parquet only the footer is read, and the Arrow table is decoded at the first row;
of jsonl an index of line positions is built. Only requested rows become Python objects. JSON is parsed line
by line and not by Arrow, whose type inference refuses columns of mixed type and turns date-like strings into
dates.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import weakref
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strop.data.chat import has_escaped_surrogate, refuse_surrogates
from strop.data.fetch import fetch, row_format
from strop.data.row_files import ParquetFile, Row, RowFile, corrupt

if TYPE_CHECKING:
    import pyarrow

RowSource = Sequence[Any]  # `FileRows`, or a user's data set of dictionaries or finished items


class RepeatedKey(ValueError):
    """An object has a key twice; the argument is the key."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(next(name for name in names if names.count(name) > 1))
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


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
            value = _parse(_text_of(line))
        except RepeatedKey as error:
            raise _repeated(f"{self.address}, row {row} (line {self._line(start)})", error) from error
        except (ValueError, RecursionError) as error:
            raise corrupt(self.address, "json", error, row) from error
        return _as_row(value, self.address, row, has_escaped_surrogate(line))

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
            text = _text_of(data)
            values = _parse(text)
        except RepeatedKey as error:
            raise _repeated_in_array(text, address) from error
        except (ValueError, RecursionError) as error:
            raise corrupt(address, "json", error) from error
        risky = has_escaped_surrogate(data)
        self._rows = [_as_row(value, address, row, risky) for row, value in enumerate(values)]
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
        return hashlib.sha256("".join(file.fingerprint for file in self.files).encode()).hexdigest()[:16]


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


def _text_of(data: bytes) -> str:
    """The text of a file or a line in UTF-8."""
    return data.removeprefix(BOM_UTF8).decode()  # the codec utf-8-sig is one of Python, and slower


def _parse(text: str) -> Any:
    """The value of a JSON text; RepeatedKey or another ValueError if it has none."""
    return _DECODER.decode(text)


def _repeated(where: str, error: RepeatedKey) -> ValueError:
    """The error about a row that has a key twice."""
    return ValueError(
        f"{where} has the key {error.args[0]!r} twice in one object, so that one of the two values would be "
        "lost. Rename or remove one."
    )


def _repeated_in_array(text: str, address: str) -> ValueError:
    """The error about the first row of a JSON array that has a key twice."""
    row = 0
    place = text.index("[") + 1
    while True:
        while text[place] in ", \t\r\n":
            place += 1
        try:
            _, end = _DECODER.raw_decode(text, place)
        except RepeatedKey as error:
            line = text.count("\n", 0, place) + 1
            return _repeated(f"{address}, row {row} (line {line})", error)
        place = end
        row += 1


def _as_row(value: object, address: str, row: int, risky: bool) -> dict[str, Any]:
    """A parsed value as a row; ValueError if it is none. `risky`: whether its text names a surrogate."""
    if not isinstance(value, dict):
        raise ValueError(
            f"{address}, row {row} is a JSON {type(value).__name__}; a row is an object with columns as keys."
        )
    if risky:
        refuse_surrogates(value, f"{address}, row {row}")
    return value


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
