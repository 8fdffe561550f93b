"""A seccomp filter: system calls that a program of a model never needs, and that could harm the machine.

The filter is a classic BPF program that the kernel runs before every system call of the process and of all
its descendants; it cannot be removed. Refused calls return an error, so that a program which tries one can go
on. Calls that are newer than this list do not exist for the program.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Sequence

_libc = ctypes.CDLL(None, use_errno=True)

# name: number on x86_64, number on aarch64 ("-": not there)
_NUMBERS = """
acct 163 89, add_key 248 217, adjtimex 159 171, bpf 321 280, chmod 90 -, chown 92 -, chroot 161 51
clock_adjtime 305 266, clock_settime 227 112, clone 56 220, clone3 435 435, create_module 174 -
delete_module 176 106, fanotify_init 300 262, fanotify_mark 301 263, fchmod 91 52, fchmodat 268 53
fchmodat2 452 452, fchown 93 55, fchownat 260 54, fcntl 72 25, finit_module 313 273, fremovexattr 199 16
fsconfig 431 431, fsetxattr 190 7, fsmount 432 432, fsopen 430 430, fspick 433 433, futimesat 261 -
init_module 175 105, inotify_add_watch 254 27, io_uring_enter 426 426, io_uring_register 427 427
io_uring_setup 425 425, ioctl 16 29, ioperm 173 -, iopl 172 -, ioprio_set 251 30, kcmp 312 272
kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219, kill 62 129, lchown 94 -, listmount 458 458
lookup_dcookie 212 18, lremovexattr 198 15, lsetxattr 189 6, memfd_create 319 279, memfd_secret 447 447
migrate_pages 256 238, mmap 9 222, modify_ldt 154 -, mount 165 40, mount_setattr 442 442, move_mount 429 429
move_pages 279 239, mq_open 240 180, mq_unlink 241 181, msgget 68 186, name_to_handle_at 303 264
nfsservctl 180 42, open 2 -, open_by_handle_at 304 265, open_tree 428 428, openat 257 56, openat2 437 437
perf_event_open 298 241, pidfd_getfd 438 438, pidfd_send_signal 424 424, pivot_root 155 41, prlimit64 302 261
process_madvise 440 440, process_mrelease 448 448, process_vm_readv 310 270, process_vm_writev 311 271
ptrace 101 117, quotactl 179 60, quotactl_fd 443 443, reboot 169 142, removexattr 197 14, request_key 249 218
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, sched_setaffinity 203 122, sched_setattr 314 274
sched_setparam 142 118, sched_setscheduler 144 119, semget 64 190, setdomainname 171 162, sethostname 170 161
setns 308 268, setpriority 141 140, settimeofday 164 170, setxattr 188 5, shmat 30 196, shmget 29 194
socket 41 198, socketpair 53 199, statmount 457 457, swapoff 168 225, swapon 167 224, syslog 103 116
tgkill 234 131, tkill 200 130, truncate 76 45, umount2 166 39, unshare 272 97, uselib 134 -
userfaultfd 323 282, utime 132 -, utimensat 280 88, utimes 235 -, vhangup 153 58
"""
_NEWEST = 462  # numbers are the same on all machines from 424 on; also above: the x32 calls of x86_64
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*

# At every level: administration, tracing, kernel features with a history of exploits, and memory that the
# limits of a process do not count (memfd, System V shared memory and queues).
_REFUSED = (
    "acct add_key adjtimex bpf chroot clock_adjtime clock_settime create_module delete_module fanotify_init "
    "fanotify_mark finit_module fsconfig fsmount fsopen fspick init_module io_uring_enter io_uring_register "
    "io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl listmount lookup_dcookie memfd_create "
    "memfd_secret migrate_pages modify_ldt mount mount_setattr move_mount move_pages msgget "
    "name_to_handle_at nfsservctl open_by_handle_at open_tree perf_event_open pidfd_getfd pivot_root "
    "process_madvise process_mrelease process_vm_readv process_vm_writev ptrace quotactl quotactl_fd reboot "
    "request_key semget setdomainname sethostname setns settimeofday shmat shmget statmount swapoff swapon "
    "syslog umount2 unshare uselib userfaultfd vhangup"
)
# Where the program shares the machine's file system and user with other processes, and Landlock has no rule
# for the call: metadata of files, message queues, watches.
_REFUSED_OUTSIDE = (
    "chmod chown fchmod fchmodat fchmodat2 fchown fchownat fremovexattr fsetxattr futimesat "
    "inotify_add_watch lchown lremovexattr lsetxattr mq_open mq_unlink removexattr setxattr socket utime "
    "utimensat utimes"
)
_REFUSED_SIGNALS = "pidfd_send_signal rt_sigqueueinfo rt_tgsigqueueinfo tkill"

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NEW_NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_AF_NETLINK = 16
_SOCK_STREAM = 1
_MAP_HUGETLB = 0x40000
_O_TRUNC_ACCMODE = 0o1003
_O_TRUNC = 0o1000
_F_SETOWN = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to other processes
_IOCTLS = (0x8901, 0x8902, 0x5412, 0x541C)  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX

# Instructions of classic BPF
_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_GREATER = 0x25
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL = 0x80000000
_ARCH_OFFSET = 4
_ARGUMENTS_OFFSET = 16
_WORD = 0xFFFFFFFF

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

Instruction = tuple[int, int, int, int]


def problem() -> str:
    """Return why a filter cannot be installed on this machine; empty if it can."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        return f"seccomp: no list of system calls for {machine}"
    # Without a filter, a kernel with seccomp answers EFAULT.
    _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    number = ctypes.get_errno()
    if number in (errno.EFAULT, errno.EACCES):
        return ""
    return f"seccomp: {os.strerror(number)}"


def build_filter(*, outside: bool, scoped_signals: bool = True, network: bool = False) -> bytes:
    """Return the filter as bytes.

    `outside`: the program is in the machine's namespaces; metadata of files, sockets and settings of other
    processes are refused too. `scoped_signals`: Landlock forbids signals to other processes; if not, only
    signals to the process that calls this function are allowed. `network`: allow what network libraries need.
    """
    machine = os.uname().machine
    rules = _Rules(machine)
    rules.refuse(_REFUSED.split())
    rules.refuse(["clone3"], errno.ENOSYS)  # its flags are in memory; libc uses clone instead
    rules.allow_only("clone", [(0, _NEW_NAMESPACES, (0,))])
    rules.refuse_values("mmap", 3, _MAP_HUGETLB, (_MAP_HUGETLB,))  # such pages are not counted
    families: tuple[int, ...] = _FAMILIES
    if network:
        families = (*_FAMILIES, _AF_NETLINK)
    if outside:
        _refuse_outside(rules, scoped_signals)
    else:
        rules.allow_only("socket", [(0, _WORD, families)], errno.EAFNOSUPPORT)
        rules.allow_only("socketpair", [(0, _WORD, families)], errno.EAFNOSUPPORT)
    return rules.to_bytes()


def _refuse_outside(rules: _Rules, scoped_signals: bool) -> None:
    rules.refuse(_REFUSED_OUTSIDE.split())
    # A pair of streams cannot be connected to anything else; datagrams can be sent to any address.
    rules.allow_only("socketpair", [(0, _WORD, (1,)), (1, 0xF, (_SOCK_STREAM,))])
    for name in ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"):
        rules.allow_only(name, [(0, _WORD, (0,))])  # of the calling process
    for name in ("setpriority", "ioprio_set"):
        rules.allow_only(name, [(1, _WORD, (0,))])
    # Old versions of Landlock have no right for truncation.
    rules.refuse(["truncate"])
    rules.refuse(["openat2"], errno.ENOSYS)  # its flags are in memory
    rules.refuse_values("open", 1, _O_TRUNC_ACCMODE, (_O_TRUNC,))
    rules.refuse_values("openat", 2, _O_TRUNC_ACCMODE, (_O_TRUNC,))
    rules.refuse_values("fcntl", 1, _WORD, _F_SETOWN)
    rules.refuse_values("ioctl", 1, _WORD, _IOCTLS)
    if not scoped_signals:
        rules.refuse(_REFUSED_SIGNALS.split())
        for name in ("kill", "tgkill"):
            rules.allow_only(name, [(0, _WORD, (os.getpid(),))])


def install(program: bytes) -> None:
    """Apply the filter to this process permanently; no_new_privs must be set."""

    class _Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    content = _Program(len(program) // 8, program)
    if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(content), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


class _Rules:
    """Instructions of a filter; each rule ends with a return for its system call."""

    def __init__(self, machine: str):
        self.numbers = dict(_numbers(machine))
        self.code: list[Instruction] = [
            (_LOAD, 0, 0, _ARCH_OFFSET),
            (_EQUAL, 1, 0, _MACHINES[machine]),
            (_RETURN, 0, 0, _KILL),  # system calls of another architecture, e.g. 32 bits
            (_LOAD, 0, 0, 0),
            (_GREATER, 0, 1, _NEWEST),
            (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        ]

    def refuse(self, names: Sequence[str], number: int = errno.EPERM) -> None:
        """Let these calls fail with an error number."""
        for name in names:
            self._add(name, [(_RETURN, 0, 0, _ERRNO | number)])

    def allow_only(
        self, name: str, conditions: Sequence[tuple[int, int, Sequence[int]]], number: int = errno.EPERM
    ) -> None:
        """Allow the call if for all (argument, mask, values), the masked argument is one of the values."""
        body: list[Instruction] = []
        for argument, mask, values in conditions:
            body += _compare(argument, mask, values)
            body.append((_RETURN, 0, 0, _ERRNO | number))
        body.append((_RETURN, 0, 0, _ALLOW))
        self._add(name, body)

    def refuse_values(self, name: str, argument: int, mask: int, values: Sequence[int]) -> None:
        """Refuse the call if the masked argument is one of the values."""
        refused = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
        self._add(name, [*_compare(argument, mask, values), (_RETURN, 0, 0, _ALLOW), refused])

    def _add(self, name: str, body: Sequence[Instruction]) -> None:
        if name in self.numbers:
            self.code.append((_EQUAL, 0, len(body), self.numbers[name]))
            self.code.extend(body)

    def to_bytes(self) -> bytes:
        code = [*self.code, (_RETURN, 0, 0, _ALLOW)]
        return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _compare(argument: int, mask: int, values: Sequence[int]) -> Iterator[Instruction]:
    """Yield instructions that jump over the one that follows them if the argument is one of the values.

    Only the low half of the argument is compared: the kernel takes flags, families and pids as 32 bits.
    """
    yield (_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * argument)
    yield (_AND, 0, 0, mask)
    for position, value in enumerate(values):
        yield (_EQUAL, len(values) - position, 0, value)


def _numbers(machine: str) -> Iterator[tuple[str, int]]:
    column = 1 + list(_MACHINES).index(machine)
    for entry in _NUMBERS.replace("\n", ",").split(","):
        fields = entry.split()
        if fields and fields[column] != "-":
            yield fields[0], int(fields[column])
