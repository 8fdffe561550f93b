"""Functions of a caller as functions of a file: found where they are, written with what they use, or refused."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from strop.api.functions import IN_PROCESS, locate, tools_file
from strop.registry import load_attribute
from tests.api.scene import digits

NOTEBOOK = '''
import math as m
import re
from collections import Counter

WEIGHT = 0.5
NUMBER = re.compile(r"[0-9]+", re.MULTILINE)
connection = object()

class Scale:
    factor = WEIGHT

    def __init__(self):
        self.factor = m.sqrt(Scale.factor)

def helper(text):
    return len(NUMBER.findall(text)) * Scale().factor

def reward(completion, answer=WEIGHT, **row):
    """A reward."""
    if not completion:
        return reward("7")
    return m.floor(helper(completion) + Counter(completion)["7"]) + answer

def uses_connection(completion):
    return connection

def outer():
    secret = 3
    def inner(completion):
        return secret
    return inner

anonymous = lambda completion: 0.0

def digits_of(text):
    return NUMBER.findall(text)

numbers = digits_of
row = object()

def uses_another_name(completion, **row):
    return len(numbers(completion)) + len(row)

def uses_local_names(completion):
    connection = [row for row in completion]
    return len(connection)

COUNTS = Counter("aab")

def uses_a_subclass_of_dict(completion):
    return COUNTS[completion]
'''


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module __main__ without a file, whose sources are known as those of a notebook's cells are."""
    module = ModuleType("__main__")
    name = "<cell 1>"
    linecache.cache[name] = (len(NOTEBOOK), None, NOTEBOOK.splitlines(keepends=True), name)
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(NOTEBOOK, name, "exec"), vars(module))
    yield module
    del linecache.cache[name]


def test_a_function_of_a_package_is_named_by_its_module(tmp_path: Path) -> None:
    found = locate(digits, tmp_path)
    assert (found.path, found.name, found.problem) == ("pkg://tests.api.scene", "digits", None)
    assert load_attribute(found.path, found.name) is digits


def test_a_function_of_a_plain_file_is_named_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_reward_file.py").write_text("def score(completion): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("my_reward_file")
    found = locate(module.score, tmp_path)
    assert found.path == str(tmp_path / "my_reward_file.py") and found.problem is None


def test_a_function_of_a_notebook_is_written_with_what_it_uses(notebook: ModuleType, tmp_path: Path) -> None:
    found = locate(notebook.reward, tmp_path)
    assert found.problem is None and Path(found.path).parent == tmp_path
    loaded = load_attribute(found.path, found.name)
    for text in ("", "17 and 7", "none"):
        assert loaded(text) == notebook.reward(text)
    assert locate(notebook.reward, tmp_path) == found  # the same content, the same file
    assert len(list(tmp_path.glob("*.py"))) == 1


@pytest.mark.parametrize("name", ["uses_another_name", "uses_local_names"])
def test_names_of_a_function_are_those_that_it_reads(notebook: ModuleType, tmp_path: Path, name: str) -> None:
    """A second name of a function is written too; a local variable with the name of a global is not."""
    function = getattr(notebook, name)
    found = locate(function, tmp_path)
    assert found.problem is None
    assert load_attribute(found.path, found.name)("17 and 7") == function("17 and 7")


@pytest.mark.parametrize(
    ("choose", "why"),
    [
        (lambda cell: cell.uses_a_subclass_of_dict, "uses COUNTS, a Counter"),
        (lambda cell: cell.uses_connection, "uses connection, an object"),
        (lambda cell: cell.outer(), "inside another function and uses secret of it"),
        (lambda cell: cell.anonymous, "not a function with a name"),
        (lambda cell: cell.Scale(), "a Scale, not a function with a name"),
    ],
)
def test_what_exists_in_this_process_only(
    choose: Callable[[ModuleType], Callable[..., object]], why: str, notebook: ModuleType, tmp_path: Path
) -> None:
    found = locate(choose(notebook), tmp_path)
    assert found.path == IN_PROCESS and found.problem is not None
    assert "exists in this process only" in found.problem and why in found.problem


def test_the_file_of_tools_can_be_read(tmp_path: Path) -> None:
    from strop.agents.tool_set import read_entries

    file = tools_file([locate(digits, tmp_path)], tmp_path)
    assert read_entries(str(file)) == [{"function": "pkg://tests.api.scene:digits"}]
