"""A table: rows with named columns, as a sequence of dictionaries."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import pandas

Row = dict[str, object]
SHOWN_ROWS = 20
SHOWN_COLUMNS = 8
SHOWN_CHARACTERS = 40


class Table(Sequence[Row]):
    """Rows of a run. `table[0]` is a row, `table["critic/score/mean"]` a column."""

    def __init__(self, rows: Sequence[Mapping[str, object]]) -> None:
        self._rows = [dict(row) for row in rows]

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in the order of their first occurrence."""
        seen: dict[str, None] = {}
        for row in self._rows:
            seen.update(dict.fromkeys(row))
        return list(seen)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @overload
    def __getitem__(self, key: int) -> Row: ...

    @overload
    def __getitem__(self, key: slice) -> Table: ...

    @overload
    def __getitem__(self, key: str) -> list[object]: ...

    def __getitem__(self, key: int | slice | str) -> Row | Table | list[object]:
        if isinstance(key, int):
            return self._rows[key]
        if isinstance(key, slice):
            return Table(self._rows[key])
        if key not in self.columns:
            raise KeyError(f"{key!r} is no column. Columns: {', '.join(self.columns) or 'none'}.")
        return [row.get(key) for row in self._rows]

    def points(self, column: str) -> list[tuple[float, float]]:
        """(step, value) of every row that has a number in the column."""
        found = []
        for row in self._rows:
            step = row.get("step")
            value = row.get(column)
            if isinstance(step, int | float) and isinstance(value, int | float):
                found.append((float(step), float(value)))
        return found

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a pandas frame."""
        from strop.extras import require

        frame: pandas.DataFrame = require("pandas", extra="pandas", why="Table.to_pandas").DataFrame(
            self._rows, columns=self.columns
        )
        return frame

    def __repr__(self) -> str:
        names = self.columns[:SHOWN_COLUMNS]
        if not names:
            return "Table(0 rows)"
        lines = [names, *([_shown(row.get(name)) for name in names] for row in self._rows[:SHOWN_ROWS])]
        widths = [max(len(line[place]) for line in lines) for place in range(len(names))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([*text, self._summary()])

    def _repr_html_(self) -> str:
        names = self.columns[:SHOWN_COLUMNS]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = ""
        for row in self._rows[:SHOWN_ROWS]:
            cells = "".join(f"<td>{html.escape(_shown(row.get(name)))}</td>" for name in names)
            body += f"<tr>{cells}</tr>"
        return f"<table><tr>{head}</tr>{body}</table><p>{html.escape(self._summary())}</p>"

    def _summary(self) -> str:
        return f"[{len(self)} rows x {len(self.columns)} columns]"


def _shown(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    text = " ".join(text.split())
    if len(text) > SHOWN_CHARACTERS:
        return text[: SHOWN_CHARACTERS - 3] + "..."
    return text
