"""Run a function as a user without any privileges, in a forked process."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.rewards.sandbox import launch, namespaces, seccomp

NOBODY = 65534
_NEW_MOUNTS = 0x20000
LANDLOCK = 444  # landlock_create_ruleset


def as_nobody(function: Callable[[], Any], refused: Sequence[str | int] = ()) -> Any:
    """The result of the function, called by the user `nobody`; `refused`: system calls that fail for it.

    A user who is not root stays the same. Where `nobody` cannot read the interpreter, it is mounted for it.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read_end)
            if os.geteuid() == 0:
                _become_nobody()
            _refuse(refused)
            launch._best.cache_clear()
            launch.isolation_problem.cache_clear()
            answer: tuple[str, Any] = ("value", function())
            code = 0
        except BaseException:  # noqa: BLE001 - the parent gets every failure
            answer = ("failed", traceback.format_exc())
        with os.fdopen(write_end, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        kind, value = pickle.load(pipe)
    os.waitpid(child, 0)
    if kind == "failed" and "cannot make the interpreter readable" in value:
        pytest.skip("cannot make the interpreter readable for other users")
    assert kind == "value", value
    return value


def _become_nobody() -> None:
    needed = [sys.base_prefix, sysconfig.get_path("purelib"), str(Path(strop.__file__).parent.parent)]
    hidden = sorted({_hidden_parent(os.path.realpath(path)) for path in needed} - {None})
    if hidden:
        _mount_readable([os.path.realpath(path) for path in needed], [str(path) for path in hidden])
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _hidden_parent(path: str) -> str | None:
    for parent in reversed(Path(path).parents):
        if not parent.stat().st_mode & 0o001:
            return str(parent)
    return None


def _mount_readable(needed: Sequence[str], hidden: Sequence[str]) -> None:
    """In mounts of our own: cover folders that others cannot enter, and bind what is needed inside them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0:
        raise OSError("cannot make the interpreter readable")
    namespaces._mount(None, "/", None, namespaces._REC | namespaces._PRIVATE)
    opened = {path: os.open(path, os.O_PATH) for path in needed}
    for folder in hidden:
        namespaces._mount("tmpfs", folder, "tmpfs", 0, "mode=755")
    for path, descriptor in opened.items():
        if any(path.startswith(f"{folder}/") for folder in hidden):
            os.makedirs(path, exist_ok=True)
            namespaces._mount(f"/proc/self/fd/{descriptor}", path, None, namespaces._BIND | namespaces._REC)
        os.close(descriptor)


def _refuse(calls: Sequence[str | int]) -> None:
    """Let system calls fail in this process and all that it starts."""
    if not calls:
        return
    rules = seccomp._Rules(os.uname().machine)
    for number, call in enumerate(calls):
        name = str(call)
        if isinstance(call, int):
            name = f"call {number}"
            rules.numbers[name] = call
        rules.refuse([name])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(namespaces._PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    seccomp.install(rules.to_bytes())
