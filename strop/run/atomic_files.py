"""Files that survive a crash: flushed to the disk before anything refers to them, with their checksum; and
JSON.

JSON is strict: NaN and infinity become the texts "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True)
class Fingerprint:
    """Size and checksum of a file, compared when it is read again."""

    size: int
    crc32: int


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Fingerprint:
    """Write the pieces one after the other and flush them to the disk; returns size and checksum."""
    size = crc = 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            size += len(piece)
            crc = zlib.crc32(piece, crc)
        file.flush()
        os.fsync(file.fileno())
    return Fingerprint(size, crc)


def fingerprint(path: Path) -> Fingerprint:
    """Size and checksum of a file as it is now."""
    size = crc = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return Fingerprint(size, crc)


def flush_file(path: Path) -> Fingerprint:
    """Flush a file that another library wrote to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return fingerprint(path)


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to the disk: a rename is durable only after this. Some file systems (SMB,
    FUSE) cannot flush a folder and say so with EINVAL or ENOTSUP; their files were flushed all the same."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def flush_tree(root: Path) -> None:
    """`flush_folder` for a folder and all folders inside."""
    for folder, _, _ in os.walk(root):
        flush_folder(Path(folder))


def replace_text(path: Path, text: str) -> None:
    """Change a small file so that a reader sees the old text or the new one, never a part of either."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # a link there would name the file that is written, and a pipe blocks
    try:
        write_file(temporary, [text.encode()])
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def to_json(value: object, *, indent: int | None = None) -> str:
    """A value as JSON text; what JSON has no form for becomes its `str`.

    >>> to_json({"loss": float("nan"), "path": ["é", 1]})
    '{"loss": "NaN", "path": ["é", 1]}'
    """
    text = json.dumps(_json_value(value), indent=indent, ensure_ascii=False, default=str, allow_nan=False)
    # Half a surrogate pair, which byte-level tokenizers can leave, has no UTF-8.
    return text.encode("utf-8", "replace").decode()


def _json_value(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a tensor or array with one number
        return _json_value(value.item())
    return value
