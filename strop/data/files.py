"""Files of rows: parquet, json and jsonl, on this machine or behind any fsspec address.

Opening a file costs a glance: parquet is known by its footer and decoded into one Arrow table at the first row, jsonl is an
index of line positions. Only the row that is asked for becomes Python. JSON is parsed line by line and not by Arrow, whose
type inference refuses columns of mixed type and turns strings that look like dates into dates.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strop.registry import did_you_mean

Row = dict[str, Any]
FORMATS = (".parquet", ".json", ".jsonl")
HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")


def cache_root() -> Path:
    """Where copies of remote files live: $STROP_CACHE, or ~/.cache/strop."""
    return Path(os.environ.get("STROP_CACHE") or "~/.cache/strop").expanduser()


def is_remote(address: str) -> bool:
    return "://" in address and not address.startswith("file://")


def fetch(address: str) -> Path:
    """The local path of a file; a remote one is copied to the cache, once per version of its content."""
    return _download(address) if is_remote(address) else _local(address)


class RowFile(ABC):
    """Rows of one file, by number."""

    def __init__(self, address: str, path: Path):
        self.address = address
        self.path = path

    columns: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> Row: ...

    @abstractmethod
    def column(self, name: str) -> Iterator[Any]:
        """The values of one column, top to bottom; None where a row lacks it."""

    def table(self) -> Any:
        """All rows as one Arrow table."""
        import pyarrow

        columns = {}
        for name in self.columns:
            try:
                columns[name] = pyarrow.array(list(self.column(name)))
            except (pyarrow.ArrowException, OverflowError) as error:
                said = " ".join(str(error).split())[:200]
                raise ValueError(f"{self.address}: the column {name!r} has values of different types: {said}") from error
        return pyarrow.table(columns)

    @property
    def stem(self) -> str:
        return Path(self.address.rpartition("/")[2]).stem

    def fingerprint(self) -> str:
        """Changes when the file does. Reads its size and both ends (a parquet footer describes every page), not all of it."""
        size = self.path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with self.path.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
        return digest.hexdigest()[:16]


class ParquetFile(RowFile):
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
        self._table: Any = None

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Row:
        if self._table is None:
            self._table = self._read(None)
        return self._table.slice(row, 1).to_pylist(maps_as_pydicts="lossy")[0]

    def column(self, name: str) -> Iterator[Any]:
        if name not in self.columns:
            yield from (None for _ in range(len(self)))
            return
        for batch in self._read([name]).to_batches(max_chunksize=8192):
            yield from batch.column(0).to_pylist(maps_as_pydicts="lossy")

    def table(self) -> Any:
        return self._read(None)

    def _read(self, columns: list[str] | None) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(self.path, columns=columns, memory_map=True, partitioning=None)
            table.validate(full=True)  # rotten text would otherwise surface at its row, in the middle of a run
            return table
        except (pyarrow.ArrowException, OSError, ValueError, LookupError) as error:
            raise _corrupt(self.address, "parquet", error) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}  # other processes read the file themselves


class JsonLinesFile(RowFile):
    """One JSON object per line. Every line is parsed once at the start, so that a bad one is found before a run begins."""

    def __init__(self, address: str, path: Path):
        super().__init__(address, path)
        self._bytes: mmap.mmap | None = None
        self._spans = _line_spans(path)
        seen: dict[str, None] = {}
        for row in range(len(self)):
            seen.update(dict.fromkeys(self[row]))
        self.columns = list(seen)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, row: int) -> Row:
        if self._bytes is None:
            with self.path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start, end = self._spans[row]
        try:
            value = json.loads(self._bytes[int(start) : int(end)].decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise _corrupt(self.address, "json", error, row) from error
        return _object(value, self.address, row)

    def column(self, name: str) -> Iterator[Any]:
        return (self[row].get(name) for row in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None}


class JsonArrayFile(RowFile):
    """One JSON array of objects."""

    def __init__(self, address: str, path: Path):
        super().__init__(address, path)
        try:
            values = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise _corrupt(address, "json", error) from error
        self._values = [_object(value, address, row) for row, value in enumerate(values)]
        self.columns = list(dict.fromkeys(name for row in self._values for name in row))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> Row:
        return self._values[row]

    def column(self, name: str) -> Iterator[Any]:
        return (row.get(name) for row in self._values)


class Rows(Sequence[Row]):
    """Several files, one after the other."""

    def __init__(self, files: Sequence[RowFile]):
        self.files = list(files)
        self.counts = [len(file) for file in self.files]
        self._ends = np.cumsum(self.counts).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        file, row = self.place(index)
        return file[row]

    def place(self, index: int) -> tuple[RowFile, int]:
        """The file of a row, and the row's number in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of {len(self)}.")
        number = bisect.bisect_right(self._ends, index)
        return self.files[number], index - (self._ends[number] - self.counts[number])

    def where(self, index: int) -> str:
        """How to name a row to a person; rows count from 0."""
        file, row = self.place(index)
        return f"{file.address}, row {row}"

    def column(self, name: str) -> Iterator[Any]:
        for file in self.files:
            yield from file.column(name)

    @property
    def columns(self) -> list[str]:
        """Columns that every file has, in the order of the first."""
        if not self.files:
            return []
        return [name for name in self.files[0].columns if all(name in file.columns for file in self.files)]

    def table(self) -> Any:
        """All rows as one Arrow table; a column that a file lacks is null there."""
        import pyarrow

        try:
            return pyarrow.concat_tables([file.table() for file in self.files], promote_options="permissive")
        except pyarrow.ArrowException as error:
            names = ", ".join(file.address for file in self.files)
            raise ValueError(f"{names} cannot be joined: {' '.join(str(error).split())[:200]}") from error

    def fingerprint(self) -> str:
        return hashlib.sha256("".join(file.fingerprint() for file in self.files).encode()).hexdigest()[:16]


def addresses(files: str | Sequence[str] | None, *, key: str = "data.train_files") -> list[str]:
    """One path or a list of them, as a list."""
    listed = [files] if isinstance(files, str | os.PathLike) else list(files or [])
    if not listed:
        raise ValueError(f"{key} names no file. Set it to one path or a list of them.")
    return [str(file) for file in listed]


def open_file(address: str) -> RowFile:
    """Open one file by its extension. Missing, corrupt or empty: ValueError that names it."""
    path = fetch(address)
    kind = _format(address)
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


def open_rows(files: str | Sequence[str] | None, *, key: str = "data.train_files") -> Rows:
    """Open all files of a setting; `key` is its name, for messages."""
    return Rows([open_file(address) for address in addresses(files, key=key)])


def count_rows(files: str | Sequence[str]) -> int:
    """How many rows files have, from parquet footers and line ends alone."""
    total = 0
    for address in addresses(files):
        path = fetch(address)
        if _format(address) == ".parquet" or (path.stat().st_size and _first_byte(path) == b"["):
            total += len(open_file(address))
        else:
            total += len(_line_spans(path))
    return total


def _format(address: str) -> str:
    suffix = Path(address.partition("?")[0]).suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{address} ends in {suffix or 'no extension'!r}; files of rows end in {', '.join(FORMATS)}.")
    return suffix


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        while piece := file.read(4096):
            text = piece.removeprefix(b"\xef\xbb\xbf").lstrip()
            if text:
                return text[:1]
    return b""


def _line_spans(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Start and end of every line that is not blank."""
    spans = []
    place = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                spans.append((place, place + len(line)))
            place += len(line)
    return np.asarray(spans, dtype=np.int64).reshape(-1, 2)


def _object(value: Any, address: str, row: int) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{address}, row {row} is a JSON {type(value).__name__}; a row is an object with columns as keys.")
    return value


def _corrupt(address: str, kind: str, error: BaseException, row: int | None = None) -> ValueError:
    place = address if row is None else f"{address}, row {row}"
    said = " ".join(str(error).split())[:300]
    return ValueError(f"{place} cannot be read as {kind}: {type(error).__name__}: {said}")


def _local(address: str) -> Path:
    path = Path(address.removeprefix("file://")).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        held = sorted(file.name for file in path.iterdir() if file.suffix in FORMATS)
        raise ValueError(f"{address} is a folder; name its files. It holds: {', '.join(held[:10]) or 'no file of rows'}.")
    if HUB_NAME.fullmatch(address) and path.suffix.lower() not in FORMATS:
        raise ValueError(
            f"{address} does not exist. A data set of the Hugging Face hub is named by its files: "
            f"hf://datasets/{address}/FILE.parquet, or the paths of files that were fetched."
        )
    beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = did_you_mean(path.name, beside) if path.parent.is_dir() else f" The folder {path.parent} does not exist either."
    raise ValueError(f"{address} does not exist.{hint}")


def _download(address: str) -> Path:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(address)
        if not system.isfile(path):
            raise FileNotFoundError("no such file")
        version = hashlib.sha256(f"{address} {system.ukey(path)}".encode()).hexdigest()[:24]
        target = cache_root() / "files" / version / address.partition("?")[0].rpartition("/")[2]
        if target.is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        system.get_file(path, str(part))
        os.replace(part, target)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"{address} cannot be fetched: {type(error).__name__}: {error}") from error
    return target
