"""Isolation of a program with Linux namespaces, mounts and dropped privileges.

Root unshares namespaces and mounts directly, and the program gets an unused user id. Other users do it inside
a user namespace, in which the program's capabilities are dropped. In both cases the program sees no network,
no other process, and no files except a read-only interpreter and a small folder in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

NEW_ROOT = "/sys"  # the mount point of the new root; any folder that exists on every machine would do
WORK = "/sandbox"
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
MAX_FILES = 4096

# Flags of unshare(2)
_CLONE_NEWNS = 0x20000
_CLONE_NEWUTS = 0x4000000
_CLONE_NEWIPC = 0x8000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
# Flags of mount(2)
_RDONLY = 1
_NOSUID = 2
_NODEV = 4
_NOEXEC = 8
_REMOUNT = 32
_NOATIME = 1024
_NODIRATIME = 2048
_BIND = 4096
_MOVE = 8192
_REC = 16384
_PRIVATE = 1 << 18
_LOCKED = _NOSUID | _NODEV | _NOEXEC | _NOATIME | _NODIRATIME  # a user namespace must keep these
# Options of prctl(2)
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE = 1
_CAP_DAC_READ_SEARCH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> None:
    """Leave the namespaces of the machine; child processes that are forked later run in the new ones.

    Root does not use a user namespace: in one it would still be the machine's root for the files of
    /proc/sys.
    """
    flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    if os.geteuid() == 0:
        _syscall("unshare", flags)
    else:
        _unshare_user(flags, 0, 0)


def _unshare_user(flags: int, user: int, group: int) -> None:
    """Enter a user namespace, with the ids `user` and `group` in it."""
    outer_user = os.geteuid()
    outer_group = os.getegid()
    _syscall("unshare", flags | _CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {outer_user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {outer_group} 1")


def build_root(folders: Sequence[str], megabytes: int) -> None:
    """Change to a new root with system libraries and `folders`, all read-only, and an empty work folder."""
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    bound: list[str] = []
    for path in [*SYSTEM, *DEVICES, *sorted(folders)]:
        if os.path.lexists(path) and not _is_below(path, bound):
            _bind_read_only(path)
            bound.append(path)
    os.makedirs(NEW_ROOT + WORK, exist_ok=True)
    _mount(
        "tmpfs",
        NEW_ROOT + WORK,
        "tmpfs",
        _NOSUID | _NODEV,
        f"size={megabytes}m,nr_inodes={MAX_FILES},mode=1777",
    )
    os.makedirs(NEW_ROOT + "/proc")
    # Refused in containers whose /proc is partly hidden; programs rarely need it.
    with contextlib.suppress(OSError):
        _mount("proc", NEW_ROOT + "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir(NEW_ROOT)
    _mount(".", "/", None, _MOVE)
    os.chroot(".")
    os.chdir(WORK)
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _bind_read_only(path: str) -> None:
    """Mount a file or folder at the same path below the new root; everything but devices is read-only."""
    target = NEW_ROOT + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, _BIND | _REC)
    flags = _REMOUNT | _BIND | _NOSUID | (os.statvfs(target).f_flag & _LOCKED)
    if not path.startswith("/dev/"):
        flags |= _RDONLY | _NODEV
    _mount(None, target, None, flags)


def drop_privileges(
    user: int | None, *, reads_all: bool = False, nested: bool = True, dumpable: bool = True
) -> None:
    """Become `user` (root only; None: stay), and drop every capability irrevocably.

    `reads_all`: keep the capability to read what file modes forbid, for levels that restrict files in another
    way. `nested`: forbid further user namespaces from inside a new one; a seccomp filter does it too.
    `dumpable`: other processes of the user may read the memory of this one.
    """
    if reads_all:
        _syscall("prctl", _PR_SET_KEEPCAPS, 1, 0, 0, 0)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    set_dumpable(dumpable)  # if not, /proc/self belongs to root
    if nested:
        with contextlib.suppress(OSError):
            _unshare_user(0, os.getuid(), os.getgid())
            # In its own namespace, a process may forbid further ones: no way to get capabilities back.
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    kept: tuple[int, ...] = (0,)
    if reads_all:
        kept = (1 << _CAP_DAC_READ_SEARCH, 1 << _CAP_DAC_OVERRIDE, 0)  # containers often lack the first
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if all(_libc.capset(header, (ctypes.c_uint32 * 6)(mask, mask)) != 0 for mask in kept):
        raise PermissionError(ctypes.get_errno(), "capabilities cannot be dropped")
    _syscall("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    _syscall("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def become_reaper() -> None:
    """Adopt orphaned descendants as children, so that all of them can be killed."""
    _syscall("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_dumpable(allowed: bool) -> None:
    """Set whether processes of the same user may read the memory of this one."""
    _syscall("prctl", _PR_SET_DUMPABLE, int(allowed), 0, 0, 0)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = (_c_string(source), _c_string(target), _c_string(kind))
    if _libc.mount(*arguments, ctypes.c_ulong(flags), _c_string(options or None)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source or ''} on {target}: {os.strerror(number)}")


def _c_string(text: str | None) -> bytes | None:
    if text is None:
        return None
    return text.encode()


def _syscall(name: str, *values: int) -> None:
    """Call a function of libc; OSError if it fails."""
    if getattr(_libc, name)(*values) != 0:
        number = ctypes.get_errno()
        message = f"{name}: {os.strerror(number)}"
        if number in (errno.EPERM, errno.EACCES):
            raise PermissionError(number, message)
        raise OSError(number, message)
