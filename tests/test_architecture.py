"""The floor plan, checked: which folder may import which, where heavy libraries live, sizes, names and types.

Each test prints the line to change. The limits are the ones in docs/architecture.md.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys
from tests.source_trees import nodes, parsed

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "strop"

# A folder imports folders of earlier lines only, never a folder of its own line or a later one.
FLOORS = [
    {"registry", "extras", "errors", "concurrency", "host", "http_replies", "__init__"},
    {"compat", "cpu"},
    {"catalog", "stopping"},
    {"config"},
    {"types", "ranks", "planning"},
    {"algorithms", "data", "models", "rewards"},
    {"rollout", "agents", "backends", "run"},
    {"runtime"},
    {"shared"},
    {"ppo", "supervised", "inference"},
    {"policy"},
    {"preflight", "replay", "serve"},
    {"quickstart", "board", "api"},
    {"trainer"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

# Imports between folders of one line, each for a reason.
SIDE_DOORS = {
    ("models", "algorithms"),  # the fused head computes log-probs
    ("models", "data"),  # token budgets of micro-batches
    ("rewards", "models"),  # a reward model in the loop
    ("rewards", "data"),  # its chat template
    ("rewards", "algorithms"),  # length penalties
    ("data", "algorithms"),
    ("agents", "rollout"),  # agents sample from an engine
}

# A heavy or optional library -> the only files that may import it.
ONE_HOME = {
    "hydra": {"config/hydra.py"},
    "omegaconf": {"config/hydra.py", "config/references.py"},
    "ray": {"runtime/ray/connection.py"},
    "vllm": {"rollout/vllm/driver.py", "rollout/vllm/extension.py"},
    "sglang": {"rollout/sglang.py"},
    "peft": {"models/lora.py"},
    "mcp": {"agents/mcp.py"},
    "megatron": {"backends/megatron/library.py"},
    "verifiers": {"agents/environments/verifiers.py"},
    "openenv": {"agents/environments/openenv.py"},
    "gymnasium": {"agents/environments/gym.py"},
    "math_verify": {"rewards/rules/math_symbolic.py"},
    "matplotlib": {"run/chart.py"},
    "wandb": {"run/trackers/wandb.py"},
    "mlflow": {"run/trackers/mlflow.py"},
    "swanlab": {"run/trackers/swanlab.py"},
    "trackio": {"run/trackers/trackio.py"},
    "tensorboard": {"run/trackers/tensorboard.py"},
    "fastapi": {"rewards/server.py", "serve/app.py"},
    "starlette": {"board/app.py"},
}

MAX_FILE_LINES = 400
MAX_FOLDER_FILES = 20
MAX_WIDTH = 110
MAX_STEP_FILES = 45


@functools.cache
def shape() -> ModuleType:
    """benchmarks/shape.py, which measures the same things."""
    spec = importlib.util.spec_from_file_location("shape", REPOSITORY / "benchmarks" / "shape.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shape"] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def imports(file: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in a file, inside functions too, and of `require("module", ...)`."""
    found = []
    for node in nodes(file):
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


def runtime_imports(file: Path) -> list[tuple[int, str]]:
    """The same without `if TYPE_CHECKING:`, which only mypy reads."""
    hidden: set[int] = set()
    for node in nodes(file):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            hidden.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return [(line, module) for line, module in imports(file) if line not in hidden]


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room(file: Path) -> str:
    parts = file.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def test_rooms_import_only_rooms_above_them():
    wrong = []
    for file in files():
        here = room(file)
        assert here in FLOOR, f"{file}: a new folder needs a line in FLOORS of this test"
        for line, module in imports(file):
            if module.split(".")[0] != "strop":
                continue
            there = (module.split(".") + ["__init__"])[1]
            if there == here or FLOOR[there] < FLOOR[here] or (here, there) in SIDE_DOORS:
                continue
            wrong.append(f"{file.relative_to(REPOSITORY)}:{line} {here} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_file_takes_part_in_an_import_cycle():
    cycles = shape().import_cycles(shape().read_modules())
    assert not cycles, "\n".join(" <-> ".join(cycle) for cycle in cycles)


def test_the_search_for_cycles_finds_one():
    module = shape().Module
    names = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    made = {name: module(name, Path(name), 1, 1, [], imports=others) for name, others in names.items()}
    limit = sys.getrecursionlimit()
    assert shape().import_cycles(made) == [["b", "c"]]
    assert sys.getrecursionlimit() == limit


def test_a_program_begins_after_all_of_its_file_is_defined():
    """`python -m` runs the block of `__main__` where it stands; what is defined below it does not exist yet."""
    wrong = []
    for file in files():
        for node in parsed(file).body[:-1]:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
                wrong.append(f"{file.relative_to(REPOSITORY)}:{node.lineno} must be the end of the file")
    assert not wrong, "\n".join(wrong)


def test_heavy_libraries_have_one_home():
    wrong = []
    for file in files():
        where = str(file.relative_to(ROOT))
        for line, module in runtime_imports(file):
            homes = ONE_HOME.get(module.split(".")[0])
            if homes is not None and where not in homes:
                wrong.append(
                    f"{where}:{line} imports {module}, which belongs to {' or '.join(sorted(homes))}"
                )
    assert not wrong, "\n".join(wrong)


def test_the_configuration_room_never_imports_torch():
    light = [*(ROOT / "config").rglob("*.py"), *(ROOT / "planning").rglob("*.py")]
    light += [ROOT / name for name in ("registry.py", "catalog.py", "cli.py", "errors.py")]
    wrong = []
    for file in light:
        for line, module in runtime_imports(file):
            if module.split(".")[0] in ("torch", "transformers", "numpy", "pyarrow"):
                wrong.append(f"{file.relative_to(ROOT)}:{line} {module}")
    assert not wrong, "\n".join(wrong)


def test_no_room_is_called_utils():
    assert not [
        file for file in files() if "util" in file.stem or "helper" in file.stem or "common" in file.stem
    ]


def test_files_and_folders_stay_small():
    wrong = []
    for file in files():
        lines = len(file.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(f"{file.relative_to(REPOSITORY)} has {lines} lines, at most {MAX_FILE_LINES}")
    for folder in {file.parent for file in files()}:
        count = len(list(folder.glob("*.py")))
        if count > MAX_FOLDER_FILES:
            wrong.append(f"{folder.relative_to(REPOSITORY)} has {count} files, at most {MAX_FOLDER_FILES}")
    assert not wrong, "\n".join(wrong)


def test_the_folders_of_tests_are_the_folders_of_the_package():
    tested = {path.parent.name for path in (REPOSITORY / "tests").glob("*/test_*.py")}
    unknown = tested - {room(file) for file in files()} - TESTS_OF_NO_FOLDER
    assert not unknown, f"tests/{sorted(unknown)}: no folder of strop/ has this name"


TESTS_OF_NO_FOLDER = {"examples", "golden"}


def test_lines_end_at_110():
    """Ruff checks the code; this one also sees what `# noqa` hides."""
    wrong = []
    for file in files():
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if len(line) > MAX_WIDTH:
                wrong.append(f"{file.relative_to(REPOSITORY)}:{number} has {len(line)} characters")
    assert not wrong, "\n".join(wrong)


def test_every_class_name_is_used_once():
    twice = shape().duplicate_classes(shape().read_modules())
    assert not twice, "\n".join(f"{name}: {' and '.join(homes)}" for name, homes in twice.items())


def test_no_configuration_is_untyped():
    """`config: Any` would hide a mistyped key from mypy."""
    wrong = []
    for file in files():
        for node in nodes(file):
            if isinstance(node, ast.arg):
                name, annotation = node.arg, node.annotation
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name, annotation = node.target.id, node.annotation
            else:
                continue
            if name in CONFIGURATION_NAMES and shape().is_any(annotation):
                wrong.append(f"{file.relative_to(REPOSITORY)}:{node.lineno} {name}: Any")
    assert not wrong, "\n".join(wrong)


CONFIGURATION_NAMES = (
    "config",
    "rollout_config",
    "model_config",
    "actor_config",
    "trainer_config",
    "section",
)

PER_THOUSAND = {"conditional": 15, "comprehension": 22, "tuple assignment": 4, "Any": 12}


def test_dense_expressions_and_any_stay_rare():
    """Per 1,000 lines of code, over the whole package; `python benchmarks/shape.py --worst 15` shows where."""
    modules = shape().read_modules().values()
    code = sum(module.code for module in modules)
    wrong = []
    for name, limit in PER_THOUSAND.items():
        rate = 1000 * sum(module.counts[name] for module in modules) / code
        if rate > limit:
            wrong.append(f"{name}: {rate:.1f} per 1,000 lines, at most {limit}")
    assert not wrong, "\n".join(wrong)


def test_limits_that_the_schema_declares_have_no_second_default():
    """A default stands once, in config/schema. These classes carry values of the configuration."""
    wrong = []
    for place, names in CARRIES_CONFIGURATION.items():
        file, _, class_name = place.partition(":")
        (found,) = (
            node
            for node in parsed(ROOT / file).body
            if isinstance(node, ast.ClassDef) and node.name == class_name
        )
        fields = {
            node.target.id: node.value
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        assert set(names) <= fields.keys(), f"{place} has no field {sorted(set(names) - fields.keys())}"
        wrong += [f"{place}.{name} has a default" for name in names if fields[name] is not None]
    assert not wrong, "\n".join(wrong)


CARRIES_CONFIGURATION = {
    "agents/episode.py:EpisodeLimits": (
        "max_assistant_turns",
        "max_user_turns",
        "tool_error_policy",
        "call_timeout",
    ),
    "agents/tool_session.py:CallLimits": (
        "timeout",
        "max_response_length",
        "truncate_side",
        "max_parallel",
    ),
    "run/watchdog.py:WatchdogLimits": ("warning", "timeout"),
    "planning/rollout.py:PlannedSampler": ("max_rows", "batch_tokens", "share"),
}


def test_protocols_have_no_holes():
    """Engines and backends are asked through their protocol, not by `hasattr`."""
    wrong = []
    pattern = re.compile(
        r"\b(hasattr|setattr)\(\s*(self\.)?(engine|actor|critic|reference|backend|roles\.\w+|model)\b"
    )
    for file in files():
        if room(file) in ("models",):  # Hugging Face modules have no protocol
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if pattern.search(line):
                wrong.append(f"{file.relative_to(REPOSITORY)}:{number} {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_an_installed_package_brings_every_file() -> None:
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    declared = pyproject["tool"]["setuptools"]["package-data"]["strop"]
    packed = {path for pattern in declared for path in ROOT.glob(pattern)}
    own = {path for path in ROOT.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert own <= packed, f"not in [tool.setuptools.package-data]: {sorted(map(str, own - packed))}"


TRIVIAL = ("", 0, 1, -1)
"""Defaults that say too little to be a repetition."""
OWN_DEFAULTS = {
    ("policy/policy.py", "device"): "a public signature, which shows its defaults",
    ("rewards/remote.py", "timeout"): "of a client; the key with this default is that of the server",
}


def literal_defaults(file: Path) -> list[tuple[int, str, object]]:
    """(line, name, value) of the parameters and class fields of a file whose default is a literal."""
    given: list[tuple[str, ast.expr]] = []
    for node in nodes(file):
        if isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            pairs = [*zip(positional[::-1], node.defaults[::-1]), *zip(node.kwonlyargs, node.kw_defaults)]
            given += [(argument.arg, value) for argument, value in pairs if value is not None]
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    given.append((statement.target.id, statement.value or ast.Tuple([])))
    return [(node.lineno, name, node.value) for name, node in given if isinstance(node, ast.Constant)]


def test_a_default_stands_once_in_the_schema():
    """What has the name of a key does not repeat its default: it takes it from the schema, as in
    `RolloutConfig.max_num_seqs`, or has none. Formulas (algorithms/) state the values of their papers."""
    defaults: dict[str, set[object]] = {}
    for root in ROOTS.values():
        for key in keys(root):
            if isinstance(key.default, str | int | float) and key.default not in TRIVIAL:
                defaults.setdefault(key.name, set()).add(key.default)
    assert 512 in defaults["max_prompt_length"]
    repeated = []
    for file in files():
        path = file.relative_to(ROOT).as_posix()
        if room(file) in ("config", "algorithms"):
            continue
        for line, name, value in literal_defaults(file):
            if value in defaults.get(name, ()) and (path, name) not in OWN_DEFAULTS:
                repeated.append(f"strop/{path}:{line}: {name}={value!r}")
    assert not repeated


@pytest.mark.slow
def test_a_training_step_runs_through_few_files():
    """`python benchmarks/shape.py --step` lists them."""
    assert len(shape().step_files()) <= MAX_STEP_FILES
