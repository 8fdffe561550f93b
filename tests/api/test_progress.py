"""What a run from Python shows, and its tables."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from strop.api import progress
from strop.api.callbacks import CallerObserver
from strop.api.table import Table


class ZMQInteractiveShell:
    """The class name by which a notebook is recognised."""


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook shows, in a process that looks like its kernel."""
    shown: list[str] = []
    package = ModuleType("IPython")
    package.get_ipython = ZMQInteractiveShell  # type: ignore[attr-defined]
    display = ModuleType("IPython.display")

    def show(view: progress.NotebookView, display_id: bool) -> SimpleNamespace:
        shown.append(view._repr_html_())
        return SimpleNamespace(update=lambda again: shown.append(again._repr_html_()))

    display.display = show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_a_notebook_shows_one_table_that_changes(updates: list[str]) -> None:
    observer = CallerObserver(title="a < b")
    assert observer.replaces_console and progress.is_interactive()
    observer.begin(0, 4)
    observer.log({"critic/score/mean": 0.25, "actor/lr": 1e-6}, 1)
    observer.close()
    assert len(updates) == 2 and "a &lt; b: step 1 of 4" in updates[1]
    assert "<td>reward</td><td>0.25</td>" in updates[1] and "lr" not in updates[1]


def test_elsewhere_the_console_writes_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert "IPython" not in sys.modules or not progress.in_notebook()
    observer = CallerObserver()
    assert not observer.replaces_console and CallerObserver(progress=False).replaces_console
    observer.begin(2, 4)
    assert "resuming from step 2 of 4" in capsys.readouterr().err
    observer.begin(4, 4)
    assert "all 4 steps of this run are done already. Give another folder=" in capsys.readouterr().err


def test_a_table_has_rows_and_columns() -> None:
    table = Table([{"step": 1, "score": 0.5}, {"step": 2, "note": "a <b>"}])
    assert table.columns == ["step", "score", "note"] and len(table) == 2
    assert table["score"] == [0.5, None] and table[1]["note"] == "a <b>" and len(table[:1]) == 1
    assert table.points("score") == [(1.0, 0.5)]
    assert "[2 rows x 3 columns]" in repr(table) and "a &lt;b&gt;" in table._repr_html_()
    assert repr(Table([])) == "Table(0 rows)"
    with pytest.raises(KeyError, match=r"'loss' is no column. Columns: step, score, note"):
        _ = table["loss"]
