"""The syntax trees of source files, read and walked once per process: several tests look at all of them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, outer ones first."""
    return tuple(ast.walk(parsed(file)))
