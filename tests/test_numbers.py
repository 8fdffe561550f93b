"""Numbers of docs/performance.md and README.md come from recorded results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checker():
    spec = importlib.util.spec_from_file_location("check_numbers", ROOT / "scripts/check_numbers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_numbers"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["check_numbers"]


def test_every_number_of_a_table_is_recorded(checker):
    assert checker.missing() == {}


def test_every_number_of_the_readme_is_on_the_page(checker):
    assert checker.missing_in_readme() == []


def test_a_changed_number_is_found(checker, tmp_path, monkeypatch):
    page = tmp_path / "performance.md"
    text = checker.PAGE.read_text()
    assert "| 213k tok/s | vLLM 0.24: 33.6k | **6.3** |" in text
    page.write_text(text.replace("| 213k tok/s |", "| 987k tok/s |", 1))
    monkeypatch.setattr(checker, "PAGE", page)
    assert checker.missing() == {"Headlines": ["987k"]}


def test_digits_decide_how_near_a_record_must_be(checker):
    (shown,) = checker.numbers("4.65 s")
    assert shown.is_near(4.654) and not shown.is_near(4.66)
    (shown,) = checker.numbers("213k tok/s, 2026-11-15")
    assert checker.is_recorded(shown, [213_400.0]) and not checker.is_recorded(shown, [214_000.0])
    assert [one.text for one in checker.numbers("1,621, 800 and 1.1e-7")] == ["1,621", "800", "1.1e-7"]
