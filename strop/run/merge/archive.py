"""The files of torch.save, read without torch.load: a zip archive with a pickle and one record per storage.

torch.load hands a TorchScript archive to its interpreter, which runs programs, and reads old formats with
Python's unpickler. Here only the plain format is read, and anything else in the archive is an error.
"""

from __future__ import annotations

import io
import math
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from strop.run.merge.plain_pickle import FindName, NamedFunction, read_pickle

_RECORD = re.compile(
    r"(?P<folder>[^/\\]+)/(data\.pkl|byteorder|version|\.format_version|\.storage_alignment"
    r"|\.data/serialization_id|data/\d+)"
)
_PROGRAM = re.compile(r"[^/]+/(constants\.pkl|code/.*)")
_CHUNK = 1 << 24
_MAX_DIMENSIONS = 64

DTYPES: dict[str, torch.dtype] = {}
for _value in vars(torch).values():
    if isinstance(_value, torch.dtype):
        DTYPES[str(_value).removeprefix("torch.")] = _value

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


class StorageNumbers:
    """The numbers of one storage."""

    def __init__(self, dtype: torch.dtype, numbers: Tensor) -> None:
        self.dtype = dtype
        self.numbers = numbers
        """As bytes."""


def find_tensor_name(module: str, name: str) -> object:
    """What stands for a name that makes tensors; ValueError for any other."""
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return _STORAGES[name]
    if (module, name) not in _FUNCTIONS:
        raise ValueError(
            f"it names {module[:80]}.{name[:80]}, which is no part of saved weights. Reading it could run "
            "code, so it is refused."
        )
    return NamedFunction(_FUNCTIONS[module, name])


def read_archive(file: Path, find: FindName) -> object:
    """The content of a file of torch.save; ValueError if it is damaged or not in the plain format."""
    try:
        with file.open("rb") as opened:
            return _read(opened, file.stat().st_size, find)
    except _DAMAGE as error:
        raise _unreadable(file, error) from error


def read_part(file: Path, offset: int, length: int, find: FindName) -> object:
    """The same for an archive that is a part of a file."""
    try:
        with file.open("rb") as opened:
            if offset < 0 or length < 0 or offset + length > file.stat().st_size:
                raise ValueError(f"it ends before byte {offset + length}")
            opened.seek(offset)
            return _read(io.BytesIO(opened.read(length)), length, find)
    except _DAMAGE as error:
        raise _unreadable(file, error) from error


def _read(opened: BinaryIO, size: int, find: FindName) -> object:
    start = opened.read(4)
    if start != b"PK\x03\x04":
        raise ValueError(
            "it is not in the zip format that torch.save writes since torch 1.6. Older formats are "
            "refused, because reading them could run code; save it again with a current version of torch"
        )
    with zipfile.ZipFile(opened) as opened_zip:
        archive = _TorchArchive(opened_zip, size)
        return read_pickle(archive.record("data.pkl"), find, archive.storage)


_DAMAGE = (
    ValueError,
    OSError,
    EOFError,
    OverflowError,
    NotImplementedError,  # a compression that zipfile does not know
    RuntimeError,  # an encrypted record
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
)


def _unreadable(file: Path, error: Exception) -> ValueError:
    message = " ".join(str(error).split())[:300]
    return ValueError(f"{file} cannot be read: {message}")


class _TorchArchive:
    """The records of an opened archive, by their names without the folder."""

    def __init__(self, opened: zipfile.ZipFile, size: int) -> None:
        self._zip = opened
        self._storages: dict[str, StorageNumbers] = {}
        self._records: dict[str, zipfile.ZipInfo] = {}
        folders: set[str] = set()
        for record in opened.infolist():
            match = _RECORD.fullmatch(record.filename)
            if match is None or match["folder"] in (".", ".."):
                raise ValueError(_foreign(record.filename))
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                raise ValueError(
                    f"its record {record.filename[:80]!r} is compressed, which torch.save never does"
                )
            if record.header_offset + record.file_size > size:
                raise ValueError(f"its record {record.filename[:80]!r} has more bytes than the file")
            name = record.filename.removeprefix(match["folder"] + "/")
            if name in self._records:
                raise ValueError(f"it has two records {name!r}")
            folders.add(match["folder"])
            self._records[name] = record
        if "data.pkl" not in self._records or len(folders) != 1:
            raise ValueError("it has no data.pkl in one folder, as files of torch.save have")
        if "byteorder" in self._records and self.record("byteorder") != sys.byteorder.encode():
            raise ValueError(f"its numbers are not in the byte order of this machine ({sys.byteorder})")

    def record(self, name: str) -> bytes:
        return self._zip.read(self._records[name])

    def storage(self, identity: object) -> StorageNumbers:
        """The storage of a persistent id ("storage", type, key, device, elements)."""
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            raise ValueError("it refers to something that is not a storage")
        _, dtype, key, _, elements = identity
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str) or not isinstance(elements, int):
            raise ValueError("it describes a storage wrongly")
        record = self._records.get(f"data/{key}")
        if record is None:
            raise ValueError(f"it has no record data/{key[:20]}")
        size = elements * dtype.itemsize
        if size != record.file_size:
            raise ValueError(f"its record data/{key[:20]} has {record.file_size} bytes, {size} were saved")
        if key not in self._storages:
            self._storages[key] = StorageNumbers(dtype, self._read(record))
        found = self._storages[key]
        if found.dtype != dtype:
            found = StorageNumbers(dtype, found.numbers)
        return found

    def _read(self, record: zipfile.ZipInfo) -> Tensor:
        numbers = torch.empty(record.file_size, dtype=torch.uint8)
        target = numbers.numpy().data
        filled = 0
        with self._zip.open(record) as source:
            while filled < record.file_size:
                piece = source.read(_CHUNK)
                if not piece or filled + len(piece) > record.file_size:
                    raise ValueError(f"its record {record.filename[:80]!r} is cut short")
                target[filled : filled + len(piece)] = piece
                filled += len(piece)
        return numbers


def _foreign(name: str) -> str:
    if _PROGRAM.fullmatch(name):
        return (
            f"it is a TorchScript archive (it holds {name[:80]!r}). Loading it would run its program, so it "
            "is refused"
        )
    return f"it holds a record {name[:80]!r}, which files of torch.save do not have"


# --- what the pickle calls ----------------------------------------------------------------------------------


def _empty_dict(arguments: tuple[object, ...]) -> dict[str, object]:
    if arguments:
        raise ValueError("it makes an OrderedDict with arguments")
    return {}


def _size(arguments: tuple[object, ...]) -> tuple[int, ...]:
    if len(arguments) != 1:
        raise ValueError("it makes a torch.Size without its numbers")
    return sizes_of(arguments[0])


def sizes_of(value: object) -> tuple[int, ...]:
    """A shape or strides; ValueError if they are not numbers of at least 0."""
    if not isinstance(value, tuple | list) or len(value) > _MAX_DIMENSIONS:
        raise ValueError("it has a tensor whose shape is not a tuple of numbers")
    for number in value:
        if type(number) is not int or number < 0:
            raise ValueError("it has a tensor whose shape is not a tuple of numbers")
    return tuple(value)


def _text(arguments: tuple[object, ...]) -> str:
    """Devices and layouts, which are not needed."""
    return ":".join(str(argument) for argument in arguments if isinstance(argument, str | int))


def _tensor_v2(arguments: tuple[object, ...]) -> Tensor:
    """(storage, offset, size, stride, ...)"""
    if len(arguments) < 4 or not isinstance(arguments[0], StorageNumbers):
        raise ValueError("it makes a tensor without a storage")
    return _tensor(arguments[0], arguments[0].dtype, arguments[1:4])


def _tensor_v3(arguments: tuple[object, ...]) -> Tensor:
    """(storage, offset, size, stride, requires_grad, hooks, dtype, ...)"""
    if len(arguments) < 7 or not isinstance(arguments[0], StorageNumbers):
        raise ValueError("it makes a tensor without a storage")
    dtype = arguments[6]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it makes a tensor without a dtype")
    return _tensor(arguments[0], dtype, arguments[1:4])


def _tensor(storage: StorageNumbers, dtype: torch.dtype, layout: Sequence[object]) -> Tensor:
    """A view of the storage; ValueError if it reaches beyond its end, or counts its numbers twice."""
    offset = layout[0]
    shape = sizes_of(layout[1])
    strides = sizes_of(layout[2])
    if type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise ValueError("it has a tensor with a wrong place in its storage")
    available, rest = divmod(storage.numbers.numel(), dtype.itemsize)
    count = math.prod(shape)
    last = offset
    for size, stride in zip(shape, strides, strict=True):
        last += max(size - 1, 0) * stride
    if rest or count > available or (count and last >= available):
        raise ValueError(f"it has a tensor of {count} numbers in a storage of {available}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return storage.numbers.view(dtype).as_strided(shape, strides, offset)


def _parameter(arguments: tuple[object, ...]) -> object:
    """(tensor, requires_grad, hooks): the tensor."""
    if not arguments:
        raise ValueError("it makes a parameter without a tensor")
    return arguments[0]


_FUNCTIONS = {
    ("collections", "OrderedDict"): _empty_dict,
    ("torch", "Size"): _size,
    ("torch", "device"): _text,
    ("torch.serialization", "_get_layout"): _text,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
