"""Rows of JSON. What Python's parser takes and a row must not hold is refused: a key that an object has
twice, of which the parser keeps the last value, and half of a surrogate pair, which UTF-8 cannot hold."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any

_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")


class RepeatedKey(ValueError):
    """An object has a key twice; the argument is the key."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(next(name for name in names if names.count(name) > 1))
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def text_of(data: bytes) -> str:
    """The text of a file or a line in UTF-8."""
    return data.removeprefix(BOM_UTF8).decode()  # the codec utf-8-sig is one of Python, and slower


def parse(text: str) -> Any:
    """The value of a JSON text; RepeatedKey or another ValueError if it has none."""
    return _DECODER.decode(text)


def repeated(where: str, error: RepeatedKey) -> ValueError:
    """The error about a row that has a key twice."""
    return ValueError(
        f"{where} has the key {error.args[0]!r} twice in one object, so that one of the two values would be "
        "lost. Rename or remove one."
    )


def repeated_in_array(text: str, address: str) -> ValueError:
    """The error about the first row of a JSON array that has a key twice."""
    row = 0
    place = text.index("[") + 1
    while True:
        while text[place] in ", \t\r\n":
            place += 1
        try:
            _, end = _DECODER.raw_decode(text, place)
        except RepeatedKey as error:
            line = text.count("\n", 0, place) + 1
            return repeated(f"{address}, row {row} (line {line})", error)
        place = end
        row += 1


def as_row(value: object, address: str, row: int, risky: bool) -> dict[str, Any]:
    """A parsed value as a row; ValueError if it is none. `risky`: whether its text names a surrogate."""
    if not isinstance(value, dict):
        raise ValueError(
            f"{address}, row {row} is a JSON {type(value).__name__}; a row is an object with columns as keys."
        )
    if risky:
        refuse_surrogates(value, f"{address}, row {row}")
    return value


def has_escaped_surrogate(data: bytes) -> bool:
    """Whether JSON in UTF-8 names a surrogate. If not, its texts hold none."""
    return _ESCAPED.search(data) is not None


def lone_surrogate(text: str) -> str | None:
    """The half of a surrogate pair that a text holds, and where, for a message; None if it is plain text.

    >>> lone_surrogate("ab\\ud83d")
    'half of a surrogate pair (U+D83D at character 2), which is no text'
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return f"half of a surrogate pair (U+{code:04X} at character {error.start}), which is no text"
    return None


def refuse_surrogates(row: Mapping[str, object], where: str) -> None:
    """ValueError that names the column if a row from JSON holds half of a surrogate pair."""
    for name, value in row.items():
        problem = lone_surrogate(name)
        if problem is None and isinstance(value, str):
            problem = lone_surrogate(value)
        elif problem is None:
            problem = lone_surrogate(json.dumps(value, ensure_ascii=False))
        if problem is not None:
            shown = name.encode("utf-8", "backslashreplace").decode()
            raise ValueError(
                f"{where}, column {shown!r} holds {problem}. It was cut out of a longer text; write the "
                "file again, for instance with text.encode('utf-8', 'ignore').decode()."
            )
