"""Formats of tool calls, one file each. `parser_for` finds one by the name in `multi_turn.format`."""

from __future__ import annotations

from typing import Any

from strop.agents.parsers.base import ToolParser
from strop.catalog import TOOL_PARSERS

__all__ = ["ToolParser", "parser_for"]


def parser_for(name: str, tokenizer: Any | None) -> ToolParser:
    """The parser called `name`; "template" (or "auto") looks at what the tokenizer's chat template writes."""
    entry = TOOL_PARSERS.entry(name)
    return entry.load()(tokenizer) if entry.facts["reads_template"] else entry.load()()
