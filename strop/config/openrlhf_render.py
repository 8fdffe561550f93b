"""Writes settings the way Hydra's command line and a shell read them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_SPECIAL = {"null", "true", "false", "inf", "nan"}


def hydra_value(value: Any) -> str:
    """A value in Hydra's grammar, such that it is read back as the same value of the same type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _SPECIAL and not _looks_like_number(text):
        return text
    # Inside quotes Hydra reads backslashes literally, except in front of a quote.
    text = re.sub(r"(\\*)('|$(?!\n))", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{text}'"


def hydra_argument(key: str, value: Any) -> str:
    """`key=value`; free-form dictionaries get their key added."""
    return f"{'++' if '.override_config.' in key else ''}{key}={hydra_value(value)}"


def shell_word(word: str) -> str:
    """A word that can be pasted into a shell, on one line."""
    if "\n" not in word and "\r" not in word:
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"$'{escaped}'"


def with_comments(lines: Iterable[tuple[str, str]]) -> list[str]:
    """`text  # comment` lines with the comments in one column where that is possible."""
    pairs = list(lines)
    width = max((len(text) for text, _ in pairs if len(text) <= 80), default=0)
    return [f"{text:<{width}}  # {_one_line(comment)}" if comment else text for text, comment in pairs]


def block(title: str, lines: list[str]) -> list[str]:
    """A titled part of a listing, or nothing."""
    return ["", f"# {title}", *lines] if lines else []


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _looks_like_number(text: str) -> bool:
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True
