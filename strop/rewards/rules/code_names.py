"""Names of the standard library that judges of functions define for every program.

A solution of LeetCode's form (`class Solution: def add(self, values: List[int]) -> int`) uses List, deque or
math without importing them, because the judge that it is written for has imported them already; verl does the
same. Without them every such program would fail.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import warnings

_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
"""Those of verl, in its order: of two that have a name, the later one gives it."""


def with_judge_names(program: str) -> str:
    """Return the program after imports of the names that it uses and defines nowhere."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(program)))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return program
    read: set[str] = set()
    defined = set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return program  # nothing may stand before it
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
    statements = [_imports()[name] for name in sorted(read - defined) if name in _imports()]
    return "\n".join([*statements, program])


@functools.cache
def _imports() -> dict[str, str]:
    """By name, the statement that imports it."""
    found: dict[str, str] = {}
    for place in (*_MODULES, "typing"):
        module = importlib.import_module(place)
        public = getattr(module, "__all__", None) or [name for name in dir(module) if name[0] != "_"]
        found |= {name: f"from {place} import {name}" for name in public}
    return found | {place: f"import {place}" for place in _MODULES}
