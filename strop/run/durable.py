"""Files that survive a crash: written to the disk before anything points at them, with the checksum taken on the way."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True)
class Fingerprint:
    """What a file must still be when it is read again."""

    size: int
    crc32: int


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Fingerprint:
    """Write the pieces one after the other; on return they are on the disk, not in a cache."""
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
    size = crc = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return Fingerprint(size, crc)


def flush_file(path: Path) -> Fingerprint:
    """Bring a file that somebody else wrote to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return fingerprint(path)


def flush_folder(path: Path) -> None:
    """Bring the names in a folder to the disk: a rename is durable only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(root: Path) -> None:
    """`flush_folder` for a folder and all folders inside."""
    for folder, _, _ in os.walk(root):
        flush_folder(Path(folder))


def replace_text(path: Path, text: str) -> None:
    """Change a small file so that a reader sees the old text or the new one, never a part of either."""
    aside = path.with_name(f".{path.name}.new")
    try:
        write_file(aside, [text.encode()])
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)
