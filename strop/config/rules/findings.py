"""What a rule reports: an error stops a run before it starts, a warning does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigFinding:
    """One problem of a configuration: the key, what clashes, and what to set."""

    level: str  # "error" or "warning"
    key: str
    message: str
    about_machine: bool = False
    """It is about what is installed here, and may not hold on another machine. A warning of this kind stops a
    run, and not `strop check`."""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


Findings = Iterator[ConfigFinding]


def error(key: str, message: str, *, about_machine: bool = False) -> ConfigFinding:
    """A finding that stops the run."""
    return ConfigFinding("error", key, message, about_machine)


def warning(key: str, message: str, *, about_machine: bool = False) -> ConfigFinding:
    """A finding that the run survives: a setting probably does not do what was meant."""
    return ConfigFinding("warning", key, message, about_machine)


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples of `divisor` next to `value`, as text: "24 or 36"."""
    below = value // divisor * divisor
    above = -(-value // divisor) * divisor
    if below <= 0 or below == above:
        return str(above)
    return f"{below} or {above}"
