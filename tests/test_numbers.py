"""Numbers of docs/performance.md, its detail pages and README.md come from recorded results."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ONE_CELL_OF_EACH_PAGE = {
    "performance.md": ("## Headlines", "| 213k tok/s | vLLM"),
    "performance/agreement.md": ("# Sampling and training agree", "| **1.1e-7** (1.10e-7"),
    "performance/algorithms.md": ("## All functions", "| 387 (376 - 439) |"),
    "performance/cpu.md": ("## Supervised training compared with TRL", "| 10.7 (9.8 - 16.8) |"),
    "performance/long_responses.md": ("## Speculation", "| 14.7k (12.6k - 23.4k) |"),
    "performance/rollouts.md": ("# Rollouts", "| 101k (95.5k - 106k) |"),
    "performance/startup_and_tests.md": ("# Startup and tests", "| 0.20 (0.19 - 0.20) |"),
    "performance/training_steps.md": ("# Training steps on a GPU", "| 3.41 (3.21 - 4.35) |"),
    "performance/updates_and_memory.md": ("## QLoRA", "| 15.5 | weights are"),
}
"""The heading of a section and the beginning of a cell of its table, which is changed to 987654321."""


@pytest.fixture
def checker():
    spec = importlib.util.spec_from_file_location("check_numbers", ROOT / "scripts/check_numbers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_numbers"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["check_numbers"]


@pytest.fixture
def copied(checker, tmp_path, monkeypatch):
    """The folder of a copy of the pages with measurements, which the checker reads."""
    shutil.copytree(ROOT / "docs/performance", tmp_path / "performance")
    shutil.copy(ROOT / "docs/performance.md", tmp_path)
    monkeypatch.setattr(checker, "DOCS", tmp_path)
    return tmp_path


def replace_once(page: Path, old: str, new: str) -> None:
    text = page.read_text()
    assert old in text, f"{page.name} has no {old!r}"
    page.write_text(text.replace(old, new, 1))


def test_every_number_of_a_table_is_recorded(checker):
    assert checker.missing() == {}


def test_every_headline_is_on_the_page_behind_its_link(checker):
    assert checker.missing_in_details() == []


def test_every_number_of_the_short_tables_is_a_headline(checker):
    assert checker.missing_in_headlines() == []


def test_every_page_has_a_cell_to_change(checker):
    assert sorted(ONE_CELL_OF_EACH_PAGE) == checker.pages()


@pytest.mark.parametrize("page", ONE_CELL_OF_EACH_PAGE)
def test_a_changed_number_is_found(checker, copied, page):
    heading, cell = ONE_CELL_OF_EACH_PAGE[page]
    number = next(checker.numbers(cell)).text
    replace_once(copied / page, cell, cell.replace(number, "987654321", 1))
    assert checker.missing() == {f"{page} {heading}": ["987654321"]}


def test_a_headline_that_its_page_does_not_have_is_found(checker, copied):
    replace_once(copied / "performance/rollouts.md", "| 213k (207k - 220k) |", "| 214k (207k - 220k) |")
    assert "performance/rollouts.md does not have 213k" in checker.missing_in_details()


def test_a_changed_goal_is_found(checker, copied):
    replace_once(copied / "performance.md", "tok/s, goal 45k", "tok/s, goal 35k")
    assert checker.missing_in_details() == ["performance/long_responses.md does not have 35k"]


def test_a_headline_without_a_link_is_found(checker, copied):
    replace_once(
        copied / "performance.md", "| [quickstart](performance/cpu.md#the-quickstart) |", "| quickstart |"
    )
    assert checker.missing_in_details() == ["quickstart: no link to a page of docs/performance/"]


@pytest.mark.parametrize(
    "page, number",
    [
        ("README.md", "4.65"),
        ("README_zh.md", "4.65"),
        ("docs/index.md", "4.65"),
        ("docs/comparison.md", "115.6"),
    ],
)
def test_a_changed_number_of_a_short_table_is_found(checker, tmp_path, monkeypatch, page, number):
    (tmp_path / "docs").mkdir()
    for name in checker.SUMMARIES:
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(checker, "ROOT", tmp_path)
    replace_once(tmp_path / page, number, "987654321")
    assert checker.missing_in_headlines() == [f"{page}: 987654321"]


def test_digits_decide_how_near_a_record_must_be(checker):
    (shown,) = checker.numbers("4.65 s")
    assert shown.is_near(4.654) and not shown.is_near(4.66)
    (shown,) = checker.numbers("213k tok/s, 2026-11-15")
    assert checker.is_recorded(shown, [213_400.0]) and not checker.is_recorded(shown, [214_000.0])
    assert [one.text for one in checker.numbers("1,621, 800 and 1.1e-7")] == ["1,621", "800", "1.1e-7"]
