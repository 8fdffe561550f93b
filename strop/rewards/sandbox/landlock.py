"""Landlock: a process without privileges forbids itself all files but some, the network, and signals.

Linux has it since 5.13; the version of its interface (ABI) says which rights it knows.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

# System calls; the numbers are the same on all machines.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_GET_VERSION = 1
_PATH_BENEATH = 1

# Rights to files
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_TRUNCATE = 1 << 14
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""ABI -> the number of rights that it knows; later versions know as many as the last one."""
_TCP_RIGHTS = 3  # bind, connect; ABI 4
_SCOPES = 3  # abstract Unix sockets, signals; ABI 6
_NETWORK_ABI = 4
_SCOPE_ABI = 6
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
"""Rights that a rule for a single file may have."""


def version() -> int:
    """Return the version of Landlock's interface; OSError if the kernel has none."""
    return _call(_CREATE_RULESET, None, 0, _GET_VERSION)


def scopes_signals(abi: int) -> bool:
    """Whether a restricted process can send signals to processes with the same restriction only."""
    return abi >= _SCOPE_ABI


class Ruleset:
    """Rules that processes apply to themselves; a file descriptor."""

    def __init__(self, readable: Iterable[str], devices: Iterable[str], writable: str):
        """`readable`: files and folders that may be read and executed; `devices`: read and written;
        `writable`: the folder in which everything is allowed. Paths that do not exist are ignored."""
        abi = version()
        self._all = (1 << _FS_RIGHTS.get(abi, max(_FS_RIGHTS.values()))) - 1
        fields = [self._all]
        if abi >= _NETWORK_ABI:
            fields.append(_TCP_RIGHTS)
        if scopes_signals(abi):
            fields.append(_SCOPES)
        attributes = struct.pack(f"={len(fields)}Q", *fields)
        self.descriptor = _call(_CREATE_RULESET, attributes, len(attributes), 0)
        for path in readable:
            self._allow(path, _READ)
        for path in devices:
            self._allow(path, _READ_FILE | _WRITE_FILE)
        self._allow(writable, self._all)

    def _allow(self, path: str, rights: int) -> None:
        try:
            target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if not stat.S_ISDIR(os.fstat(target).st_mode):
                rights &= _OF_FILES
            rule = struct.pack("=Qi", rights & self._all, target)
            _call(_ADD_RULE, self.descriptor, _PATH_BENEATH, rule, 0)
        finally:
            os.close(target)

    def restrict(self) -> None:
        """Restrict this process and its descendants permanently; no_new_privs must be set."""
        _call(_RESTRICT_SELF, self.descriptor, 0)


def _call(number: int, *values: int | bytes | None) -> int:
    arguments = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
