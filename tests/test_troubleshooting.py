"""docs/troubleshooting.md: every message of its tables is one that the code prints."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.source_trees import nodes

ROOT = Path(__file__).parents[1]
GAP = "\0"
"""Stands for a value inside a message."""


@functools.cache
def texts_of_the_package() -> list[str]:
    """Every string of the source code, with GAP for each value of an f-string."""
    found = []
    for path in (ROOT / "strop").rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                found.append(node.value)
    return found


def messages() -> list[str]:
    """The first cell of every row, without the backticks."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def is_printed(message: str) -> bool:
    pieces = [piece.strip(" ") if index else piece for index, piece in enumerate(message.split("..."))]
    return any(all(piece in text for piece in pieces) for text in texts_of_the_package())


def test_every_message_is_printed_by_the_code() -> None:
    found = messages()
    assert len(found) > 40
    assert [message for message in found if not is_printed(message)] == []
    assert not is_printed("no code prints ... this")
