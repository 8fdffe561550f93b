"""The resource limits of a sandboxed program, and the outcome of a test."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SandboxLimits:
    """Resources that a program may use."""

    seconds: float = 10.0
    """Wall-clock time of one test."""
    total_seconds: float = 60.0
    """Wall-clock time of all tests of a program; tests that were not started count as timed out."""
    memory_mb: int = 1024
    """Address space of every process, and resident memory of all processes together."""
    disk_mb: int = 64
    """Size of all files together. Where the program has no file system of its own, they are measured from
    time to time."""
    processes: int = 16
    """Processes and threads."""
    open_files: int = 128
    output_bytes: int = 1 << 20
    """Bytes of stdout, and of stderr; more output ends the program."""


@dataclass(frozen=True)
class ProgramOutcome:
    """The result of one test."""

    status: str
    """ok | error (an exception or a non-zero exit code) | timeout | memory | output | disk."""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    """Negative: killed by that signal."""
    seconds: float = 0.0
    value: object = None
    """Return value of the tested function, as JSON; True if all assertions held."""
    returned: bool = False
    """Whether there is a value: the function returned, or all assertions held."""


class SandboxError(RuntimeError):
    """The sandbox itself failed, which says nothing about the program."""


class SupervisorKilled(SandboxError):
    """A signal ended the process that supervises a program."""
