"""Names, facts, plugins."""

from __future__ import annotations

import pytest

import strop.catalog
from strop.extras import MissingExtra, require
from strop.registry import Registry, load_attribute, load_module


def test_every_built_in_can_be_imported():
    registries = [value for value in vars(strop.catalog).values() if isinstance(value, Registry)]
    assert len(registries) >= 6
    for registry in registries:
        assert registry.names(), f"no {registry.kind} is declared"
        for name in registry.names():
            assert callable(registry.get(name)), f"{registry.kind} {name}"


def test_hyphens_and_case_do_not_matter():
    registry = Registry("colour", facts={"warm": False})
    registry.declare("dark-red", "json:dumps", warm=True)
    assert registry.entry("Dark_Red").facts["warm"] is True and "dark-red" in registry
    assert registry.get("dark_red").__name__ == "dumps"


def test_unknown_names_and_facts_are_refused_with_help():
    registry = Registry("colour", facts={"warm": False})
    registry.declare("red", "json:dumps")
    with pytest.raises(ValueError, match=r"Unknown colour 'rde'.*Did you mean 'red'"):
        registry.get("rde")
    with pytest.raises(ValueError, match=r"declares \['hot'\].*\['warm'\]"):
        registry.declare("blue", "json:dumps", hot=True)
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("red")(lambda: None)


def test_user_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(x):\n    return 2 * x\n")
    assert load_attribute(str(file), "compute_score")(4) == 8
    assert load_module(f"file://{file}") is load_module(str(file))
    assert load_attribute("pkg://json", "dumps")({}) == "{}"
    with pytest.raises(ValueError, match=r"defines no 'compute_scor'.*'compute_score'"):
        load_attribute(str(file), "compute_scor")
    with pytest.raises(ValueError, match=r"has: compute_score\. custom\.name names it\."):
        load_attribute(str(file), "reward", "custom.name")
    with pytest.raises(ValueError, match="does not exist"):
        load_module(str(tmp_path / "other.py"))
    (tmp_path / "raises.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"raises.py fails while it is imported: ZeroDivisionError"):
        load_module(str(tmp_path / "raises.py"))
    (tmp_path / "imports.py").write_text("from my_scores.sums import value\n")
    with pytest.raises(ValueError, match=r"No module named 'my_scores'$"):
        load_module(str(tmp_path / "imports.py"))
    (tmp_path / "my_scores").mkdir()
    with pytest.raises(ValueError, match=rf"It lies next to imports.py: set PYTHONPATH={tmp_path}"):
        load_module(str(tmp_path / "imports.py"))
    with pytest.raises(ValueError, match="cannot be imported"):
        load_module("no_such_package_anywhere")


def test_a_missing_extra_names_what_to_install():
    with pytest.raises(
        MissingExtra, match=r"Colouring needs the package 'no_such_library'.*pip install .*\[colour\]"
    ):
        require("no_such_library", extra="colour", why="Colouring")
