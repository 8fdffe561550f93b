"""Cut a cleaned answer into numbers, letters, words, commands and signs."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from strop.rewards.rules.maths.nodes import Unreadable
from strop.rewards.rules.maths.units import MULTIPLIERS

MAX_TOKENS = 400
MAX_SETS = 8
"""Sets inside sets. Each doubles the comparisons."""
FUNCTION_NAMES = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan"),
    *("ln", "log", "lg", "exp", "asin", "acos", "atan"),
)
PLAIN_COMMANDS = (*FUNCTION_NAMES, "sqrt", "pi", "infty", "infinity", "cup", "cap")
_FONTS = ("text", "textbf", "textit", "textrm", "textnormal", "textsf", "mbox", "hbox", "texttt", "emph")
_UPRIGHT = (
    "mathrm",
    "mathbf",
    "operatorname",
    "mathit",
    "mathsf",
    "mathcal",
    "mathnormal",
    "bm",
    "vec",
    "hat",
)
_SHORT_WORDS = (
    "or",
    "and",
    "no",
    "is",
    "to",
    "of",
    "in",
    "at",
    "am",
    "pm",
    "if",
    "by",
    "on",
    "an",
    "as",
    "it",
)
_PRODUCTS = ("xyzw", "abcd", "pqrst", "mnk", "uvw")  # letters that are written side by side as factors
_TOKEN = re.compile(
    r"(?P<space> +)"
    r"|(?P<number>(?:[0-9]+\.(?= ?\\overline)|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+(?![A-Za-z0-9.]))?)"
    r"|(?P<command>\\[A-Za-z]+|\\[^A-Za-z])"
    r"|(?P<letters>[^\W\d_]+)"
    r"|(?P<sign>.)",
    re.DOTALL,
)
_GROUPED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_SPACED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?: [0-9]{3})+(?![0-9./])")
_ORDINAL_SUFFIX = r"(?:\\(?:text|mathrm|textsuperscript) ?\{ ?(?:th|st|nd|rd) ?\}|(?:th|st|nd|rd)\b)"
_ORDINAL = re.compile(rf"(?<=[0-9]) ?(?:\^ ?\{{ ?{_ORDINAL_SUFFIX} ?\}}|\^? ?{_ORDINAL_SUFFIX})")


class Token(NamedTuple):
    """`kind` is number, letter, word, command or sign; a command keeps its backslash."""

    kind: str
    text: str
    spaced: bool = False
    """Whether a space stands before it."""


def tokenize(text: str, *, grouped: bool = True) -> list[Token]:
    """Return the tokens of a cleaned answer; Unreadable if there are too many.

    `grouped` reads 1,000 outside of brackets as a number with a thousands separator, else as two numbers.
    """
    text = _ORDINAL.sub("", text)
    text = _SPACED.sub(_without_separators, text)
    if grouped and "," in text:
        text = _join_groups(text)
    tokens: list[Token] = []
    _cut(text, tokens, in_text=False)
    if len(tokens) > MAX_TOKENS:
        raise Unreadable(f"The answer has more than {MAX_TOKENS} signs.")
    signs = {"\\{": 1, "\\}": -1}
    if max(itertools.accumulate(signs.get(token.text, 0) for token in tokens), default=0) > MAX_SETS:
        raise Unreadable(f"Sets are nested deeper than {MAX_SETS}.")
    return tokens


def has_grouped(text: str) -> bool:
    """Whether the answer has a number with thousands separators."""
    return _GROUPED.search(text) is not None


def _without_separators(number: re.Match[str]) -> str:
    return number[0].replace(" ", "").replace(",", "")


def _join_groups(text: str) -> str:
    """Return the text without thousands separators, but for those in brackets, where a comma separates."""
    pieces = []
    position = 0
    depth = 0
    for number in _GROUPED.finditer(text):
        before = text[position : number.start()]
        depth += sum(before.count(sign) for sign in "([") + before.count("\\{")
        depth -= sum(before.count(sign) for sign in ")]") + before.count("\\}")
        pieces.append(before)
        if depth > 0:
            pieces.append(number[0])
        else:
            pieces.append(_without_separators(number))
        position = number.end()
    return "".join(pieces) + text[position:]


def _cut(text: str, tokens: list[Token], *, in_text: bool) -> None:
    position = 0
    spaced = False
    while position < len(text) and len(tokens) <= MAX_TOKENS:
        found = _TOKEN.match(text, position)
        assert found is not None  # every character is a sign
        position = found.end()
        kind = found.lastgroup
        piece = found[0]
        if kind == "space":
            spaced = True
            continue
        if kind == "letters":
            _cut_letters(piece, tokens, spaced, in_text)
        elif kind == "command" and piece[1:] in (*_FONTS, *_UPRIGHT):
            position = _cut_font(text, position, piece[1:], tokens)
        elif kind == "command" and piece == "\\mathbb":
            argument, position = _argument(text, position)
            tokens.append(Token("command", "\\mathbb" + argument, spaced))
        else:
            tokens.append(Token(str(kind), piece, spaced))
        spaced = False


def _argument(text: str, position: int) -> tuple[str, int]:
    """Return the argument of a command in braces, or the next character, and where it ends."""
    while text[position : position + 1] == " ":
        position += 1
    if text[position : position + 1] != "{":
        return text[position : position + 1], position + 1
    depth = 0
    for end in range(position, len(text)):
        if text[end] == "{":
            depth += 1
        elif text[end] == "}":
            depth -= 1
            if depth == 0:
                return text[position + 1 : end].strip(), end + 1
    raise Unreadable("A brace is not closed.")


def _cut_font(text: str, position: int, font: str, tokens: list[Token]) -> int:
    """Cut the argument of a font command: words, or one letter."""
    argument, end = _argument(text, position)
    one_letter = len(argument) == 1 and argument.isalpha()
    if font in _UPRIGHT and (argument in ("i", "e") or (one_letter and not _after_number(tokens))):
        tokens.append(Token("letter", argument))
    elif font in _UPRIGHT and argument in FUNCTION_NAMES:
        tokens.append(Token("command", "\\" + argument))
    else:
        _cut(argument, tokens, in_text=True)
    return end


def _after_number(tokens: list[Token]) -> bool:
    return bool(tokens) and (tokens[-1].kind == "number" or tokens[-1].text in ("}", ")"))


def _cut_letters(run: str, tokens: list[Token], spaced: bool, in_text: bool) -> None:
    """Add a run of letters: a word, the name of a function, or a product of variables."""
    lower = run.lower()
    if "\u3040" <= run[0] <= "\ud7ff":  # Chinese, Japanese, Korean: 18万元
        parts = (run[0], run[1:]) if run[0] in MULTIPLIERS and _after_number(tokens) else (run,)
        tokens.extend(Token("word", part, spaced) for part in parts if part)
        return
    if run in PLAIN_COMMANDS and not (run in ("cup", "cap") and _is_measured(tokens, in_text)):
        name = "\\infty" if run == "infinity" else "\\" + run
        tokens.append(Token("command", name, spaced))
        return
    if len(run) == 1:
        kind = "word" if in_text and _after_number(tokens) else "letter"
        tokens.append(Token(kind, run, spaced))
    elif in_text or _is_word(run, lower, tokens):
        tokens.append(Token("word", run, spaced))
    else:
        for letter in run:
            tokens.append(Token("letter", letter, spaced))
            spaced = False


def _is_measured(tokens: list[Token], in_text: bool) -> bool:
    """Whether a word behind the tokens is a unit, as in 1/2 cup; (1,2) cup (3,4) is a union."""
    return in_text or (bool(tokens) and (tokens[-1].kind == "number" or tokens[-1].text == "}"))


def _is_word(run: str, lower: str, tokens: list[Token]) -> bool:
    if len(run) == 2:
        return lower in _SHORT_WORDS or (_after_number(tokens) and lower in ABBREVIATIONS)
    if len(set(run)) < len(run):
        return True
    return not any(set(run) <= set(letters) for letters in _PRODUCTS)


ABBREVIATIONS = (
    *("cm", "mm", "km", "nm", "kg", "mg", "ft", "in", "yd", "mi", "lb", "oz", "hr", "ms", "ml", "dl", "kb"),
    *("mb", "gb", "hz", "kw", "sq", "cu", "pt", "qt"),
)
