"""Empty the folder in which a program ran, whatever the program left there."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

BLOCK = 512  # bytes, of st_blocks
MAX_PENDING = 256  # folders that wait to be measured, each an open file


def empty_folder(folder: str) -> bool:
    """Remove everything in a folder; False if something could not be removed.

    No path gets longer than two names, and nothing recurses: folders may be nested deeper than the longest
    path, and than Python's stack. Folders inside a folder are moved up before it is removed.
    """
    numbers = itertools.count()
    while True:
        names = os.listdir(folder)
        removed = 0
        for name in names:
            removed += _remove(folder, os.path.join(folder, name), numbers)
        if not names:
            return True
        if not removed:
            return False


def _remove(top: str, path: str, numbers: Iterator[int]) -> bool:
    """Remove a file, or a folder whose folders are moved to `top`; False if nothing changed."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
            return True
        return False
    with contextlib.suppress(OSError):
        os.chmod(path, 0o700)
    changed = False
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            changed |= _clear_entry(top, os.path.join(path, name), numbers)
        os.rmdir(path)
        return True
    return changed


def _clear_entry(top: str, path: str, numbers: Iterator[int]) -> bool:
    try:
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return True
        os.chmod(path, 0o700)  # moving a folder needs the right to write to it
        os.rename(path, _free_name(top, numbers))
    except OSError:
        return False
    return True


def _free_name(folder: str, numbers: Iterator[int]) -> str:
    """Return a path that does not exist; the program may have made files with such names."""
    while True:
        path = os.path.join(folder, f".removed-{next(numbers)}")
        if not os.path.lexists(path):
            return path


def exceeds_disk(folder: str, size_limit: int, count_limit: int) -> bool:
    """Whether the files below a folder are too large, too many, or in folders that cannot be listed."""
    size = 0
    count = 0
    pending = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        while pending:
            descriptor = pending.pop()
            try:
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        count += 1
                        size += _size(entry, descriptor, pending)
                        if size > size_limit or count > count_limit or len(pending) > MAX_PENDING:
                            return True
            except PermissionError:
                return True
            finally:
                os.close(descriptor)
    finally:
        for descriptor in pending:
            os.close(descriptor)
    return False


def _size(entry: os.DirEntry[str], folder: int, pending: list[int]) -> int:
    """Return the size of an entry, 0 if it is gone; add a descriptor of a folder to `pending`."""
    try:
        size = entry.stat(follow_symlinks=False).st_blocks * BLOCK
        if entry.is_dir(follow_symlinks=False):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            pending.append(os.open(entry.name, flags, dir_fd=folder))
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return size
