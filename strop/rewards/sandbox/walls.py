"""The walls around a program, built with what the kernel offers to the user who runs the training. Linux only.

Two ways lead to the same place. Root unshares namespaces and mounts directly, and the program gets a user id of its own.
Anybody else does it inside a user namespace, in which the program's capabilities are dropped. Then there is no network, no
other process, and no file but a read-only interpreter and a small folder in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

NEW_ROOT = "/sys"  # hidden below the new root and needed by nobody: any folder that exists everywhere would do
WORK = "/sandbox"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
MOST_FILES = 4096

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _MOVE, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 8192, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_LOCKED = _NOSUID | _NODEV | _NOEXEC | 1024 | 2048  # flags of a mount that a user namespace must keep, with those of atime

_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> None:
    """Leave the machine's namespaces. Processes forked from now on live in the new ones.

    Root does so directly, never through a user namespace: there it would still be the machine's root to the files of /proc/sys.
    """
    flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    if os.geteuid() == 0:
        _do("unshare", flags)
    else:
        _unshare_user(flags, 0, 0)


def _unshare_user(flags: int, user: int, group: int) -> None:
    """Enter a user namespace, known there as `user` and `group`."""
    outer_user, outer_group = os.geteuid(), os.getegid()
    _do("unshare", flags | _CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {outer_user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {outer_group} 1")


def build_root(folders: Sequence[str], megabytes: int) -> None:
    """Make a new root of the system's libraries, `folders` (all read-only) and an empty work folder of `megabytes`."""
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    bound: list[str] = []
    for path in [*SYSTEM, *DEVICES, *sorted(folders)]:
        if os.path.lexists(path) and not any(path == other or path.startswith(other + "/") for other in bound):
            _show(path)
            bound.append(path)
    os.makedirs(NEW_ROOT + WORK, exist_ok=True)
    _mount("tmpfs", NEW_ROOT + WORK, "tmpfs", _NOSUID | _NODEV, f"size={megabytes}m,nr_inodes={MOST_FILES},mode=1777")
    os.makedirs(NEW_ROOT + "/proc")
    with contextlib.suppress(OSError):  # refused where the /proc of a container is partly hidden; programs rarely need it
        _mount("proc", NEW_ROOT + "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir(NEW_ROOT)
    _mount(".", "/", None, _MOVE)
    os.chroot(".")
    os.chdir(WORK)
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _show(path: str) -> None:
    """The file or folder `path` of the machine at the same place below the new root, read-only."""
    place = NEW_ROOT + path
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.mkdir(place)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, place, None, _BIND | _REC)
    device = path.startswith("/dev/")
    kept = os.statvfs(place).f_flag & _LOCKED
    _mount(None, place, None, _REMOUNT | _BIND | kept | _NOSUID | (0 if device else _RDONLY | _NODEV))


def drop_privileges(user: int | None) -> None:
    """Become `user` where that is allowed (root), and lose every capability, for good."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    set_inspectable(True)  # else /proc/self belongs to root
    with contextlib.suppress(OSError):
        _unshare_user(0, os.getuid(), os.getgid())
        # In a namespace of our own we may say that there is none below it: no way back to capabilities.
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _libc.capset(header, (ctypes.c_uint32 * 6)())
    _do("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def die_with_parent() -> None:
    _do("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def become_reaper() -> None:
    """Orphans among our descendants become our children, so that none is lost."""
    _do("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_inspectable(allowed: bool) -> None:
    """Whether processes of the same user may read our memory."""
    _do("prctl", _PR_SET_DUMPABLE, int(allowed), 0, 0, 0)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {source or ''} on {target}: {os.strerror(ctypes.get_errno())}")


def _do(name: str, *values: int) -> None:
    if getattr(_libc, name)(*values) != 0:
        number = ctypes.get_errno()
        kind = PermissionError if number in (errno.EPERM, errno.EACCES) else OSError
        raise kind(number, f"{name}: {os.strerror(number)}")
