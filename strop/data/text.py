"""Text that no tokenizer can read: JSON can hold one half of a surrogate pair, UTF-8 cannot."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")


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
                "file anew, for instance with text.encode('utf-8', 'ignore').decode()."
            )
