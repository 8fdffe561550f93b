"""System calls that no program may make, and memory that the limits of a process do not count."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from pathlib import Path

import pytest

from strop.rewards.sandbox import cgroup, launch, seccomp
from strop.rewards.sandbox.cgroup import Membership, memory_group, parent_groups
from strop.rewards.sandbox.launch import LEVELS, STRONG_LEVELS, isolation_problem, run_program
from strop.rewards.sandbox.limits import SandboxLimits

HERE = [level for level in LEVELS if not isolation_problem(level)]
LIMITS = SandboxLimits(seconds=60.0, total_seconds=200.0, memory_mb=128, disk_mb=8)
needs_seccomp = pytest.mark.skipif(bool(seccomp.problem()), reason="no seccomp filters here")

# --- memory ---------------------------------------------------------------------------------------------------------------------

HOLD_MEMFD = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
held = 0
block = bytes(1 << 20)
for name in (b'a', b'b', b'c', b'd', b'e', b'f', b'g', b'h'):
    descriptor = libc.memfd_create(name, 0)
    if descriptor < 0: break
    try:
        while os.fstat(descriptor).st_size < 64 << 20: held += os.write(descriptor, block)
    except OSError: pass
print(held >> 20)
"""
HOLD_SHARED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = libc.shmdt.argtypes = None
libc.shmat.restype = ctypes.c_void_p
held = 0
for key in range(8):
    number = libc.shmget(0, 64 << 20, 0o1600)
    if number < 0: break
    address = libc.shmat(number, None, 0)
    if address in (None, 2**64 - 1): break
    ctypes.memset(address, 1, 64 << 20)
    libc.shmdt(ctypes.c_void_p(address))
    held += 64
print(held)
"""
HOLD_STDIN = """
import os
held = 0
try:
    while held < 512 << 20: held += os.write(0, bytes(1 << 20))
except OSError: pass
print(held >> 20)
"""


@needs_seccomp
@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("program", [HOLD_MEMFD, HOLD_SHARED, HOLD_STDIN], ids=["memfd", "shared", "stdin"])
def test_memory_that_is_no_process_memory_cannot_be_held(level, program):
    outcome = run_program(program, limits=LIMITS, level=level)
    assert outcome.status == "memory" or outcome.stdout == "0\n", outcome


def group_problem() -> str:
    with memory_group(64) as group:
        return "" if group else "no control group can be created"


@pytest.mark.skipif(bool(group_problem()), reason="no control group can be created here")
def test_a_control_group_counts_everything():
    """Also a memfd: the kernel kills the process, and the group is gone afterwards."""
    with memory_group(64) as group:
        assert group is not None
        membership = Membership(group)
        child = os.fork()
        if child == 0:
            membership.join()
            descriptor = os.memfd_create("a")
            for _ in range(256):
                os.write(descriptor, bytes(1 << 20))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
        assert membership.ran_out() and not membership.ran_out()
    assert not Path(group).exists()


@pytest.mark.skipif(bool(group_problem()), reason="no control group can be created here")
def test_programs_run_in_a_control_group(monkeypatch):
    """Pipes are memory of the kernel, which no limit of a process counts."""
    groups: list[str | None] = []
    create = cgroup._create
    monkeypatch.setattr(cgroup, "_create", lambda size: groups.append(create(size)) or groups[-1])
    program = "print(open('/proc/self/cgroup').read())"
    outcome = run_program(program, limits=LIMITS, level="limits")
    assert groups[0] is not None and Path(groups[0]).name in outcome.stdout
    assert not Path(groups[0]).exists()


def test_where_groups_are(tmp_path):
    own_1 = "5:memory:/a/b\n4:cpu:/\n0::/\n"
    mounts_1 = "30 25 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n31 25 0:27 / /x rw - cgroup cgroup rw,cpu\n"
    assert parent_groups(own_1, mounts_1) == [Path("/sys/fs/cgroup/memory/a/b")]
    (tmp_path / "user" / "job").mkdir(parents=True)
    (tmp_path / "user" / "cgroup.subtree_control").write_text("cpu memory\n")
    (tmp_path / "user" / "job" / "cgroup.subtree_control").write_text("")
    mounts_2 = f"30 25 0:26 / {tmp_path} rw,relatime - cgroup2 cgroup2 rw\n"
    assert parent_groups("0::/user/job\n", mounts_2) == [tmp_path / "user"]
    assert parent_groups("0::/\n", "") == []


def test_no_group_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "_parents", lambda: [tmp_path / "gone"])
    with memory_group(64) as group:
        assert group is None
    assert run_program("print(1)", limits=LIMITS, level=HERE[0]).stdout == "1\n"


# --- system calls ---------------------------------------------------------------------------------------------------------------

CALLS = """
import ctypes, errno, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
for name, number in {numbers!r}.items():
    result = libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0)
    if result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print(name, result, ctypes.get_errno())
for family in range(3, 46):
    if family in (10, {netlink}): continue
    try: socket.socket(family, socket.SOCK_STREAM); print('socket', family)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EPERM): print('socket', family, error)
for flags in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    result = libc.syscall(ctypes.c_long({clone}), ctypes.c_long(flags | 17), 0, 0, 0, 0)
    if result == 0: libc._exit(0)
    if result != -1 or ctypes.get_errno() != errno.EPERM: print('clone', hex(flags), result)
print('end')
"""


@needs_seccomp
@pytest.mark.parametrize("level", HERE)
def test_calls_that_no_program_needs_are_refused(level):
    numbers = dict(seccomp._numbers(os.uname().machine))
    refused = {name: numbers[name] for name in seccomp._REFUSED.split() if name in numbers}
    refused |= {"clone3": numbers["clone3"], "a call of the future": 463}
    netlink = 16 if level not in STRONG_LEVELS else 10
    program = CALLS.format(numbers=refused, clone=numbers["clone"], netlink=netlink)
    outcome = run_program(program, limits=LIMITS, level=level)
    assert outcome.stdout == "end\n", outcome


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_both_machines(machine, monkeypatch):
    """Every name has a number, and what the filter decides, read by a small interpreter of its instructions."""
    monkeypatch.setattr(seccomp.os, "uname", lambda: os_uname(machine))
    numbers = dict(seccomp._numbers(machine))
    assert len(numbers) == len(set(numbers.values()))
    arch = seccomp._MACHINES[machine]
    inside = seccomp.build_filter(outside=False)
    outside = seccomp.build_filter(outside=True, scoped_signals=False)
    allow, refuse = 0x7FFF0000, 0x00050001

    def decide(code: bytes, name: str | int, *arguments: int) -> int:
        number = numbers[name] if isinstance(name, str) else name
        return interpret(code, number, arch, arguments)

    for code in (inside, outside):
        assert decide(code, "ptrace") == decide(code, "keyctl") == decide(code, "memfd_create") == refuse
        assert decide(code, "clone", 0x3D0F00) == allow and decide(code, "clone", 0x10000011) == refuse
        assert decide(code, 1) == allow and decide(code, 500) == 0x00050000 | 38
        assert (
            decide(code, "mmap", 0, 0, 0, 0x22) == allow and decide(code, "mmap", 0, 0, 0, 0x40022) == refuse
        )
        assert interpret(code, 1, 0x40000003, ()) == 0x80000000
    assert decide(inside, "socket", 2) == allow and decide(inside, "socket", 40) == 0x00050000 | 97
    assert decide(outside, "socket", 2) == refuse and decide(outside, "fchmod") == refuse
    assert (
        decide(outside, "socketpair", 1, 0x80001) == allow and decide(outside, "socketpair", 1, 2) == refuse
    )
    assert (
        decide(outside, "openat", 0, 0, 0o1001) == allow and decide(outside, "openat", 0, 0, 0o1000) == refuse
    )
    assert decide(outside, "kill", os.getpid(), 9) == allow and decide(outside, "kill", 1, 9) == refuse
    assert decide(outside, "kill", 2**32 - 1, 9) == refuse and decide(outside, "prlimit64", 0) == allow
    assert decide(outside, "prlimit64", 5) == refuse and decide(outside, "fcntl", 3, 8) == refuse


def os_uname(machine: str) -> os.uname_result:
    return os.uname_result(("Linux", "host", "6.0", "1", machine))


def interpret(code: bytes, number: int, arch: int, arguments: tuple[int, ...]) -> int:
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=iIQ6Q", number, arch, 0, *padded)
    instructions = list(struct.iter_unpack("=HBBI", code))
    accumulator = position = 0
    while True:
        kind, if_true, if_false, value = instructions[position]
        position += 1
        if kind == 0x20:
            [accumulator] = struct.unpack_from("=I", data, value)
        elif kind == 0x54:
            accumulator &= value
        elif kind == 0x15:
            position += if_true if accumulator == value else if_false
        elif kind == 0x25:
            position += if_true if accumulator > value else if_false
        else:
            assert kind == 0x06
            return value


@needs_seccomp
def test_a_filter_stays_for_children():
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(38, 1, 0, 0, 0)
        seccomp.install(seccomp.build_filter(outside=True))
        inner = os.fork()
        if inner == 0:
            os._exit(int(libc.chmod(b"/tmp", 0o777) == -1 and libc.unshare(0) == -1))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_the_interpreter_of_a_program_loads_little():
    """Every program pays for it; these are the modules of the standard library that take longest."""
    boot = launch._BOOT.replace("main()", "print(*sys.modules)")
    done = subprocess.run([*launch._COMMAND[:-1], boot], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "strop.rewards.sandbox.sandbox_child" in loaded
    heavy = {
        "ast",
        "asyncio",
        "dataclasses",
        "inspect",
        "logging",
        "pickle",
        "shutil",
        "subprocess",
        "tempfile",
    }
    assert not loaded & heavy
    assert not any(name.startswith(("strop.config", "torch", "numpy")) for name in loaded)
