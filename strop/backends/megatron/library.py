"""megatron-core, imported when a run uses it. Nothing else imports the library."""

from __future__ import annotations

from types import ModuleType

from strop.extras import require

EXTRA = "megatron"


def megatron(name: str) -> ModuleType:
    """A module of megatron-core, such as "parallel_state"."""
    require("megatron.core", extra=EXTRA, why="strategy=megatron")
    return require(f"megatron.core.{name}", extra=EXTRA, why="strategy=megatron")
