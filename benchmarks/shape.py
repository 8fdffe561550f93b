"""The shape of the package in numbers: file sizes, import cycles, `Any`, dense expressions, one GRPO step.

    python benchmarks/shape.py                     the table for all of strop/
    python benchmarks/shape.py strop/rewards       the same for one folder
    python benchmarks/shape.py --worst 15          also the files with the most of each kind
    python benchmarks/shape.py --step              also run a small GRPO job and count what one step calls

Rates are per 1,000 lines of code; a line of code is neither blank nor a comment.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "strop"
LIMITS = {"conditional": 15, "comprehension": 22, "tuple assignment": 4, "Any": 12}
"""Goals per 1,000 lines of code."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Module:
    name: str
    path: Path
    lines: int
    code: int
    widths: list[int]
    counts: Counter[str] = field(default_factory=Counter)
    imports: set[str] = field(default_factory=set)
    classes: list[str] = field(default_factory=list)


@functools.cache
def read_modules() -> dict[str, Module]:
    """Every file of the package, by the name that Python imports it by."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = {module_name(path) for path in paths}
    return {module_name(path): read_module(path, names) for path in paths}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def read_module(path: Path, names: set[str]) -> Module:
    text = path.read_text()
    lines = text.splitlines()
    code = sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))
    module = Module(module_name(path), path, len(lines), code, [len(line) for line in lines])
    tree = ast.parse(text)
    for node in ast.walk(tree):
        count_node(node, module.counts)
        module.imports |= imported_modules(node, names)
    module.imports.discard(module.name)
    module.classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return module


def count_node(node: ast.AST, counts: Counter[str]) -> None:
    if isinstance(node, ast.IfExp):
        counts["conditional"] += 1
    elif isinstance(node, COMPREHENSIONS):
        counts["comprehension"] += 1
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
        counts["tuple assignment"] += isinstance(node.value, ast.Tuple)
    elif (isinstance(node, ast.Name) and node.id == "Any") or (
        isinstance(node, ast.alias) and node.name == "Any"
    ):
        counts["Any"] += 1
    elif isinstance(node, ast.arg):
        counts["config: Any"] += node.arg == "config" and is_any(node.annotation)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        counts["config: Any"] += node.target.id == "config" and is_any(node.annotation)


def is_any(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def imported_modules(node: ast.AST, names: set[str]) -> set[str]:
    """Modules of the package that a statement imports, wherever in the file it stands."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & names
    if isinstance(node, ast.ImportFrom) and node.module in names:
        found = {f"{node.module}.{alias.name}" for alias in node.names} & names
        return found or {node.module}
    return set()


def import_cycles(modules: dict[str, Module]) -> list[list[str]]:
    """Strongly connected groups of more than one file (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in modules[name].imports:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] != index[name]:
            return
        start = stack.index(name)
        if len(stack) - start > 1:
            cycles.append(sorted(stack[start:]))
        del stack[start:]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    for name in modules:
        if name not in index:
            visit(name)
    sys.setrecursionlimit(limit)  # that of the process, in which other tests run
    return cycles


def duplicate_classes(modules: dict[str, Module]) -> dict[str, list[str]]:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for name in module.classes:
            homes[name].append(module.name)
    return {name: found for name, found in sorted(homes.items()) if len(found) > 1}


def print_table(modules: dict[str, Module], chosen: list[Module]) -> None:
    sizes = [module.lines for module in chosen]
    code = sum(module.code for module in chosen)
    counts: Counter[str] = sum((module.counts for module in chosen), Counter())
    importers = Counter(name for module in modules.values() for name in module.imports)
    single = [m for m in chosen if importers[m.name] == 1 and m.path.name != "__init__.py"]
    folders = Counter(module.path.parent for module in chosen)
    folder, most = folders.most_common(1)[0]
    biggest = max(chosen, key=lambda module: module.lines)
    widths = [width for module in chosen for width in module.widths]
    print(f"files                          {len(chosen)}, median {statistics.median(sizes):.0f} lines")
    print(f"files under 50 lines           {sum(size < 50 for size in sizes)}")
    print(f"files with one importer        {len(single)}")
    print(f"lines, lines of code           {sum(sizes)}, {code}")
    print(f"largest file                   {biggest.lines} ({biggest.path.relative_to(ROOT)})")
    print(f"most files in one folder       {most} ({folder.relative_to(ROOT)})")
    print(f"lines over 110 / 120           {sum(w > 110 for w in widths)} / {sum(w > 120 for w in widths)}")
    for name, limit in LIMITS.items():
        print(f"{name:<30} {counts[name]}, {1000 * counts[name] / code:.1f} per 1,000 lines (goal {limit})")
    print(f"config: Any                    {counts['config: Any']}")
    print(f"import cycles                  {len(import_cycles(modules))}")
    print(f"class names used twice         {len(duplicate_classes(modules))}")


def print_worst(chosen: list[Module], most: int) -> None:
    for name in LIMITS:
        print(f"\n{name}")
        for module in sorted(chosen, key=lambda module: -module.counts[name])[:most]:
            print(f"  {module.counts[name]:4}  {module.path.relative_to(ROOT)}")


STEP = """
import json, sys, threading
from pathlib import Path
from strop.cli import main

package, found, steps, others = Path(sys.argv[1]), {}, [], set()
AFTER_THE_STEP = ("PpoTrainer.write_samples", "save_and_log")

def count(frame, event, argument):
    file = frame.f_code.co_filename
    if event != "call" or not file.startswith(str(package)):
        return
    name = frame.f_code.co_name
    if name == "train_step":
        steps.append("running")
        others.update(threading.enumerate())
        others.discard(threading.main_thread())
    if frame.f_code.co_qualname in AFTER_THE_STEP and steps:
        steps[-1] = "over"
    if steps[1:] == ["running"] and not name.startswith("<") and threading.current_thread() not in others:
        found.setdefault(str(Path(file).relative_to(package)), set()).add(frame.f_code.co_qualname)

threading.setprofile(count)
sys.setprofile(count)
main(sys.argv[2:])
sys.setprofile(None)
print(json.dumps({file: sorted(names) for file, names in sorted(found.items())}))
"""
"""A step is the second `train_step` and its report: sample, score, estimate, update, with the threads that it
starts. What is written afterwards (samples, checkpoints, logs), also in a thread of its own while the next
step runs, is not counted."""


def step_files() -> dict[str, list[str]]:
    """Files that one GRPO step runs through, with the functions called."""
    sys.path.insert(0, str(Path(__file__).parent))
    from same_numbers import jobs, prepare_inputs

    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs"
        prepare_inputs(inputs)
        [command] = jobs(inputs)["grpo"]
        keys = [
            f"trainer.default_local_dir={folder}/run",
            "trainer.logger=file",
            "trainer.record_steps=[]",
            "trainer.total_training_steps=3",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
        ]
        run = [sys.executable, "-c", STEP, str(PACKAGE), *command, *keys]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        output = subprocess.run(run, check=True, capture_output=True, text=True, env=environment).stdout
    files: dict[str, list[str]] = json.loads(output.splitlines()[-1])
    return files


def print_step(few: int = 5) -> None:
    files = step_files()
    functions = sum(len(names) for names in files.values())
    print(f"\none GRPO step                  {len(files)} files, {functions} functions")
    for file, names in files.items():
        print(f"  {len(names):4}  {file}  {' '.join(names) if len(names) <= few else ''}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--worst", type=int, default=0)
    parser.add_argument("--step", action="store_true")
    asked = parser.parse_args()
    modules = read_modules()
    folders = [folder.resolve() for folder in asked.folders] or [PACKAGE]
    chosen = [m for m in modules.values() if any(m.path.is_relative_to(folder) for folder in folders)]
    print_table(modules, chosen)
    if asked.worst:
        print_worst(chosen, asked.worst)
    for cycle in import_cycles(modules):
        print(f"cycle: {' '.join(cycle)}")
    for name, homes in duplicate_classes(modules).items():
        print(f"class {name}: {' '.join(homes)}")
    if asked.step:
        print_step()


if __name__ == "__main__":
    main()
