"""Empty the folder in which a program ran, whatever the program left there."""

from __future__ import annotations

import os
import stat

BLOCK = 512  # bytes, of st_blocks
MAX_PENDING = 256  # folders that wait to be measured, each an open file


def empty_folder(folder: str) -> bool:
    """Remove everything in a folder; False if something could not be removed. No process may use it.

    It goes down and up by descriptors and does not recurse: folders may be nested deeper than the longest
    path, and than Python's stack.
    """
    try:
        os.chmod(folder, os.stat(folder).st_mode & 0o7777 | 0o700)
        walk = _Walk(os.open(folder, _FOLDER))
    except OSError:  # the program removed the folder itself
        return False
    try:
        while walk.step():
            pass
    except OSError:
        return False
    finally:
        os.close(walk.descriptor)
    return walk.is_clean


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class _Walk:
    """A way through folders that removes what it passes."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        """The folder that it is in."""
        self.path: list[tuple[str, list[str]]] = [("", os.listdir(descriptor))]
        """For the first folder and each one entered: its name, and what is to be removed in it."""
        self.is_clean = True

    def step(self) -> bool:
        """Remove one file, or enter or leave a folder; False at the end."""
        name, entries = self.path[-1]
        if entries:
            self._remove(entries.pop())
            return True
        if len(self.path) == 1:
            return False
        self._enter("..")
        self.path.pop()
        try:
            os.rmdir(name, dir_fd=self.descriptor)
        except OSError:
            self.is_clean = False
        return True

    def _remove(self, name: str) -> None:
        try:
            mode = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode):
                os.unlink(name, dir_fd=self.descriptor)
                return
            if mode & 0o700 != 0o700:
                os.chmod(name, 0o700, dir_fd=self.descriptor)
            self._enter(name)
        except OSError:
            self.is_clean = False
        else:
            self.path.append((name, os.listdir(self.descriptor)))

    def _enter(self, name: str) -> None:
        descriptor = os.open(name, _FOLDER, dir_fd=self.descriptor)
        os.close(self.descriptor)
        self.descriptor = descriptor


def exceeds_disk(folder: str, size_limit: int, count_limit: int) -> bool:
    """Whether the files below a folder are too large, too many, or in folders that cannot be listed."""
    size = 0
    count = 0
    try:
        pending = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY)]
    except OSError:
        return True
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
