"""The public surface: lazy, typed, documented, listed in docs/api.md, and no larger than what is pinned here."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import strop
from strop.api.surface import public_names, public_object, reference

ROOT = Path(__file__).parents[2]
SURFACE = {
    *("grpo", "ppo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("sft", "dpo", "reward_model", "generate", "evaluate"),
    *("Policy", "Datum", "StepOutput", "Run", "Table", "Evaluation", "Chart"),
}


def test_the_surface_is_pinned() -> None:
    assert set(strop.__all__) - {"__version__"} == SURFACE == set(public_names())
    assert set(strop.__all__) <= set(dir(strop))
    with pytest.raises(AttributeError, match=r"no attribute 'grpoo'"):
        _ = strop.grpoo  # type: ignore[attr-defined]


def test_the_package_ppo_is_called_like_the_function() -> None:
    import strop.ppo.build

    for function in (strop.ppo, public_object("ppo")):
        with pytest.raises(ValueError, match=r"train holds no rows"):
            function("nowhere", train=[], reward=lambda completion: 0.0, folder="nowhere")  # type: ignore[operator]


def test_the_stub_has_the_same_names() -> None:
    tree = ast.parse((ROOT / "strop" / "__init__.pyi").read_text())
    imported = {name.asname for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert imported == SURFACE


def test_everything_public_has_types_and_documentation() -> None:
    for name in public_names():
        value = public_object(name)
        assert inspect.getdoc(value), name
        functions = [value] if inspect.isfunction(value) else list(vars(value).values())
        for function in functions:
            if isinstance(function, property):
                function = function.fget
            if not inspect.isfunction(function) or function.__name__.startswith("_"):
                continue
            assert inspect.getdoc(function), f"{name}.{function.__name__}"
            parameters = list(inspect.signature(function).parameters.values())
            missing = [p.name for p in parameters if p.annotation is p.empty and p.name != "self"]
            assert not missing, f"{name}.{function.__name__}: {missing}"
            assert inspect.signature(function).return_annotation is not inspect.Signature.empty


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == reference(), (
        "run: python -m strop.api.surface > docs/api.md"
    )


def test_importing_strop_imports_nothing_heavy() -> None:
    """The modules are counted in a process of their own; a clock would depend on the machine."""
    code = "import sys; before = set(sys.modules); import strop; print(*(set(sys.modules) - before))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(found.stdout.split())
    assert {name for name in names if name.startswith("strop")} == {"strop"}
    assert not names & {"torch", "transformers", "omegaconf", "hydra", "numpy", "pyarrow", "rich", "pandas"}
