"""What a run from Python shows while it lasts: a view, updated in place, in a terminal or a notebook."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from strop.run.trackers.console import LiveView, shown


class ProgressView(Protocol):
    """Shows the progress of a run."""

    def update(self, metrics: Mapping[str, float | str], step: int) -> None: ...

    def close(self) -> None: ...


def open_view(title: str, step: int, total: int) -> ProgressView | None:
    """The view of this place; None where there is no terminal and no notebook (the tracker `console` then
    writes its lines)."""
    if in_notebook():
        return NotebookView(title, step, total)
    if not sys.stdout.isatty():
        return None
    return LiveView.on_terminal(sys.stdout, title=title, total=total, start=step)


def can_show() -> bool:
    """Whether `open_view` has a place to show something."""
    return in_notebook() or sys.stdout.isatty()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython is not imported for the answer."""
    shell = _shell()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def is_interactive() -> bool:
    """Whether a person types at this process: a notebook, IPython, or Python's own prompt."""
    return _shell() is not None or hasattr(sys, "ps1")


def _shell() -> Any:
    if "IPython" not in sys.modules:
        return None
    return sys.modules["IPython"].get_ipython()


class NotebookView:
    """A table under the cell, updated in place."""

    def __init__(self, title: str, step: int, total: int) -> None:
        from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

        self.title = title
        self.step = step
        self.total = total
        self.values: dict[str, float] = {}
        self._handle = display(self, display_id=True)

    def update(self, metrics: Mapping[str, float | str], step: int) -> None:
        self.step = step
        self.values |= shown(metrics)
        self._handle.update(self)

    def close(self) -> None:
        """The last state stays."""

    def __repr__(self) -> str:
        values = ", ".join(f"{label} {value:.4g}" for label, value in self.values.items())
        return f"{self.title}: step {self.step} of {self.total}; {values}"

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self.step}" max="{self.total}"></progress>'
        rows = ""
        for label, value in self.values.items():
            rows += f"<tr><td>{html.escape(label)}</td><td>{value:.4g}</td></tr>"
        head = f"{html.escape(self.title)}: step {self.step} of {self.total}"
        return f"<p>{head} {bar}</p><table>{rows}</table>"
