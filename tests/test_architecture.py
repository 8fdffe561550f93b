"""The arrows of the house: a room imports only rooms above it, and each heavy library lives in one file."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent / "strop"

# Lower floors may import higher floors, never the other way round, and never sideways between rooms of one floor.
FLOORS = [
    {"registry", "extras", "errors", "__init__"},
    {"catalog"},
    {"config"},
    {"types", "ranks", "planning"},
    {"algorithms", "data", "models", "rewards"},
    {"rollout", "agents", "backends", "run"},
    {"runtime"},
    {"trainer", "board"},
    {"cli"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

# Doors between rooms of one floor, each for a reason.
SIDE_DOORS = {
    ("models", "algorithms"),  # the fused head computes log-probs
    ("models", "data"),  # token budgets of micro-batches
    ("rewards", "models"),  # a reward model in the loop
    ("rewards", "data"),  # its chat template
    ("rewards", "algorithms"),  # length penalties
    ("data", "algorithms"),
    ("agents", "rollout"),  # agents talk to an engine
}

# A heavy or optional library -> the only places that may import it.
ONE_HOME = {
    "hydra": {"config/compose.py"},
    "omegaconf": {"config/compose.py"},
    "ray": {"runtime/ray.py", "runtime/ray_pool.py"},
    "vllm": {"rollout/vllm/driver.py", "rollout/vllm/extension.py"},
    "sglang": {"rollout/sglang.py"},
    "peft": {"models/lora.py"},
    "mcp": {"agents/mcp.py"},
    "math_verify": {"rewards/rules/math_symbolic.py"},
    "wandb": {"run/trackers/wandb.py"},
    "mlflow": {"run/trackers/mlflow.py"},
    "swanlab": {"run/trackers/swanlab.py"},
    "trackio": {"run/trackers/trackio.py"},
    "tensorboard": {"run/trackers/tensorboard.py"},
    "fastapi": {"rewards/server.py"},
    "starlette": {"board/app.py"},
}


@functools.cache
def imports(file: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions too, and lazy ones by `require("module", ...)`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.lineno, node.module))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "require"
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            found.append((node.lineno, node.args[0].value))
    return found


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room(file: Path) -> str:
    parts = file.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def test_rooms_import_only_rooms_above_them():
    wrong = []
    for file in files():
        here = room(file)
        assert here in FLOOR, f"{file}: a new room needs a floor in this test"
        for line, module in imports(file):
            if not module.startswith("strop"):
                continue
            there = (module.split(".") + ["__init__"])[1]
            if there == here or FLOOR[there] < FLOOR[here] or (here, there) in SIDE_DOORS:
                continue
            wrong.append(f"{file.relative_to(ROOT.parent)}:{line} {here} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_heavy_libraries_have_one_home():
    wrong = []
    for file in files():
        where = str(file.relative_to(ROOT))
        for line, module in imports(file):
            homes = ONE_HOME.get(module.split(".")[0])
            if homes is not None and where not in homes:
                wrong.append(f"{where}:{line} imports {module}, which belongs to {' or '.join(sorted(homes))}")
    assert not wrong, "\n".join(wrong)


def test_the_configuration_room_never_imports_torch():
    wrong = [
        f"{file.relative_to(ROOT)}:{line} {module}"
        for file in [
            *(ROOT / "config").rglob("*.py"),
            *(ROOT / "planning").rglob("*.py"),
            ROOT / "registry.py",
            ROOT / "catalog.py",
            ROOT / "cli.py",
            ROOT / "errors.py",
        ]
        for line, module in imports(file)
        if module.split(".")[0] in ("torch", "transformers", "numpy", "pyarrow")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_room_is_called_utils():
    assert not [file for file in files() if "util" in file.stem or "helper" in file.stem or "common" in file.stem]


def test_an_installed_package_brings_every_file() -> None:
    declared = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["strop"]
    packed = {path for pattern in declared for path in ROOT.glob(pattern)}
    own = {path for path in ROOT.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert own <= packed, f"not in [tool.setuptools.package-data]: {sorted(map(str, own - packed))}"
