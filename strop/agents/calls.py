"""What a model asked for: tool calls, and those that cannot be understood."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Raw(str):
    """An argument as the model wrote it, in a format that does not tell numbers from text. The tool's schema decides."""

    __slots__ = ()


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    """Where the format gives calls an id."""


@dataclass(frozen=True)
class Malformed:
    """A call that cannot be made."""

    text: str
    """What the model wrote."""
    why: str
    """What is wrong with it, in words for the model."""


@dataclass(frozen=True)
class Parsed:
    content: str
    """The text outside the calls."""
    calls: tuple[ToolCall | Malformed, ...] = ()
    """In the order in which they were written."""
