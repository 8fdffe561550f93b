"""Read an answer from its tokens, from the outside to the inside."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from strop.rewards.rules.maths import regions
from strop.rewards.rules.maths.expressions import parse_expression
from strop.rewards.rules.maths.nodes import Apply, Number, Symbol, TooLarge, Unreadable, symbols
from strop.rewards.rules.maths.quantities import (
    Quantity,
    contradict,
    has_variables,
    parse_quantity,
    stated_number,
    sum_of_units,
)
from strop.rewards.rules.maths.regions import Region
from strop.rewards.rules.maths.spelling import clean
from strop.rewards.rules.maths.structures import (
    Answer,
    Contradiction,
    Matrix,
    Named,
    Ordered,
    Ratio,
    Statement,
    Unordered,
    Words,
    as_region,
)
from strop.rewards.rules.maths.tokens import Token, has_grouped, tokenize
from strop.rewards.rules.maths.units import NO_UNIT, NUMBER_WORDS

MAX_LENGTH = 1_000
_OPENING = ("(", "[", "\\{", "\\langle", "\\lfloor", "\\lceil", "{")
_CLOSING = (")", "]", "\\}", "\\rangle", "\\rfloor", "\\rceil", "}")
_EQUAL = ("=", "\\approx", "\\equiv", "\\sim", "\\doteq", "\\simeq")
_ORDER = ("<", ">", "\\le", "\\ge", "\\ne")
_NO_SOLUTION = {
    "nosolution",
    "nosolutions",
    "nosolutionexists",
    "norealsolution",
    "norealsolutions",
    "emptyset",
}
_EVERYTHING = {"allrealnumbers", "allreals", "anyrealnumber", "realnumbers"}
_NO_LIMIT = {"doesnotexist", "dne", "undefined", "notdefined"}
_MATRIX = re.compile(
    r"^[\[(]?\s*\\begin\{([a-zA-Z]*matrix|array)\}(?:\{[^{}]*\})?(.*?)\\end\{\1\}\s*[\])]?$", re.DOTALL
)
_NOT_LETTERS = re.compile(r"[\W_]+")
_MINUTES = re.compile("0[0-9]")
_FUNCTION_NAME = re.compile(
    r"[a-zA-Z]'*\([a-zA-Z](?:,[a-zA-Z])*\)|[fghFGHP](?:'*|\^\{?-1\}?)\((?:[fgh]\(){0,3}-?[0-9.]+\)+"
    r"|d\w/d\w|\\frac\{d\w\}\{d\w\}|[a-zA-Z]+(?::[a-zA-Z]+)+"
)


@lru_cache(maxsize=8192)
def readings(text: str) -> tuple[Answer, ...]:
    """Return what the answer may mean.

    There are two readings where a comma may group thousands or separate numbers, and where a value is
    followed by its rounding.
    """
    if len(text) > MAX_LENGTH:
        return ()
    cleaned = clean(text)
    found = [_read(cleaned, grouped=True)]
    if has_grouped(cleaned):
        found.append(_read(cleaned, grouped=False))
    exact, rounded, _ = cleaned.rpartition("\\approx")
    if rounded and exact.strip() and not isinstance(found[0], Contradiction):
        found.append(_read(exact.strip(), grouped=True))
    return tuple(found)


def _read(text: str, *, grouped: bool) -> Answer:
    matrix = _MATRIX.match(text)
    if matrix:
        return _matrix(matrix[2])
    try:
        tokens = tokenize(text, grouped=grouped)
        return _answer(tokens)
    except (Unreadable, TooLarge, RecursionError):
        return Words(_spelled(text))


def _matrix(body: str) -> Matrix:
    rows = []
    for row in body.split("\\\\"):
        if row.strip():
            rows.append(tuple(_read(cell.strip(), grouped=True) for cell in row.split("&")))
    return Matrix(tuple(rows))


def _spelled(text: str) -> str:
    """Return the words in lower case; commands of LaTeX differ by case and are kept."""
    if "\\" in text:
        return text.replace(" ", "")
    return text.replace(" ", "").lower()


# --- Several answers ----------------------------------------------------------------------------------------


def _answer(tokens: list[Token]) -> Answer:
    """Read a whole answer: parts that commas, semicolons, `and` and `or` separate."""
    if tokens and tokens[0].text == "either":
        tokens = tokens[1:]
    parts, separators = _split(tokens, (",", ";", "and", "or"))
    items: list[Answer] = []
    for part in parts:
        if part:
            item = _part(part)
            if isinstance(item, Unordered) and _has_two_signs(part):
                items.extend(item.items)
            else:
                items.append(item)
    if len(items) == 1 and len(parts) == 1:
        return items[0]
    if not items:
        raise Unreadable("The answer is empty.")
    return _combined(items, separators)


def _has_two_signs(tokens: list[Token]) -> bool:
    return any(token.text in ("\\pm", "\\mp") for token in tokens)


def _combined(items: list[Answer], separators: list[str]) -> Answer:
    """Return several answers; inequalities joined by `or` or `and` are one region."""
    pieces = [item for item in items if isinstance(item, Region)]
    if len(pieces) == len(items) and set(separators) == {"or"}:
        return regions.union(pieces)
    if len(pieces) == len(items) and set(separators) == {"and"}:
        return regions.intersection(pieces)
    quantities = [item for item in items if isinstance(item, Quantity)]
    if len(quantities) == len(items) and set(separators) == {"and"}:
        total = sum_of_units(quantities)
        if total is not None:
            return total
    return Unordered(tuple(items))


def _split(tokens: list[Token], separators: tuple[str, ...]) -> tuple[list[list[Token]], list[str]]:
    """Cut the tokens at the separators outside of brackets; also return the separators."""
    if not any(token.text.lower() in separators for token in tokens):
        return [tokens], []
    parts: list[list[Token]] = [[]]
    found = []
    depth = 0
    for token in tokens:
        if token.kind != "number" and token.text in _OPENING:
            depth += 1
        elif token.kind != "number" and token.text in _CLOSING:
            depth -= 1
        if depth == 0 and token.text.lower() in separators and token.kind != "number":
            found.append(token.text.lower())
            parts.append([])
        else:
            parts[-1].append(token)
    return parts, found


# --- One answer ---------------------------------------------------------------------------------------------


def _part(tokens: list[Token]) -> Answer:
    if _has_two_signs(tokens):
        return Unordered((_part(_with_signs(tokens, "+", "-")), _part(_with_signs(tokens, "-", "+"))))
    sides, relations = _split(tokens, (*_EQUAL, *_ORDER, "\\in"))
    if not relations:
        return _single(tokens)
    if not sides[0] and relations[0] in _EQUAL:  # "= 5" and "\approx 5"
        return _part(tokens[1:])
    if not all(sides):
        raise Unreadable("A side of a relation is missing.")
    if relations == ["\\in"]:
        return _single(sides[1])
    if all(relation in _EQUAL for relation in relations):
        return _equation(sides)
    if all(relation in _ORDER for relation in relations):
        return _inequality(sides, relations)
    raise Unreadable("Relations of several kinds.")


def _with_signs(tokens: list[Token], upper: str, lower: str) -> list[Token]:
    signs = {"\\pm": Token("sign", upper), "\\mp": Token("sign", lower)}
    return [signs.get(token.text, token) for token in tokens]


def _equation(sides: list[list[Token]]) -> Answer:
    name = _name(sides[0])
    if name is None and len(sides) == 2:
        name = _name(sides[1])
        if name is not None and _name(sides[0]) is None:
            sides = [sides[1], sides[0]]
    if name is not None:
        values = [_single(side) for side in sides[1:]]
        if contradict([value for value in values if isinstance(value, Quantity)]):
            return Contradiction(name)
        value = values[-1]
        if isinstance(value, Quantity) and name in symbols(value.node):
            return Statement("=", Apply("-", (Symbol(name), value.node)))
        return Named(name, value)
    last = parse_quantity(sides[-1])
    try:
        quantities = [*map(parse_quantity, sides[:-1]), last]
    except Unreadable:
        first = sides[0][0]
        if len(sides) > 2 or first.kind == "number" or first.text in ("-", "(", "\\frac", "\\sqrt"):
            raise  # "5 because 2+4=6" is not 6
        return Named("".join(token.text for token in sides[0]), last)
    if contradict(quantities) and not any(map(has_variables, quantities)):
        return Contradiction("=")
    if len(sides) == 2 and any(map(has_variables, quantities)):
        other = quantities[0]
        return Statement("=", Apply("-", (other.node, last.node)), stated_number(other, last))
    return last


def _name(tokens: list[Token]) -> str | None:
    """Return what stands on the left of a result: a variable, f(2), dy/dx, a:b, (x, y), words; else None."""
    if all(token.kind == "word" for token in tokens):
        return " ".join(token.text.lower() for token in tokens)
    if any(token.kind not in ("letter", "sign", "number", "command") for token in tokens):
        return None
    text = "".join(token.text for token in tokens)
    if re.fullmatch(r"\(\w(?:_\{?\w\}?)?(?:,\w(?:_\{?\w\}?)?)+\)", text):
        return text
    if _FUNCTION_NAME.fullmatch(text):
        return text
    try:
        node = parse_expression(tokens)
    except (Unreadable, TooLarge):
        return None
    if isinstance(node, Symbol) and node.name not in ("e", "i", "\\pi", "\\infty"):
        return node.name
    return None


def _inequality(sides: list[list[Token]], relations: list[str]) -> Answer:
    nodes = [parse_expression(side) for side in sides]
    region = regions.solution(nodes, relations)
    if region is not None:
        return region
    if len(nodes) > 2:
        raise Unreadable("A chain of inequalities with variables at its ends.")
    left, right = nodes
    relation = relations[0]
    if relation in (">", "\\ge"):
        left, right = right, left
        relation = {">": "<", "\\ge": "\\le"}[relation]
    return Statement(relation, Apply("-", (left, right)))


def _single(tokens: list[Token]) -> Answer:
    """Read a part without relation: brackets, a union, a ratio, a quantity, or words."""
    special = _special(tokens)
    if special is not None:
        return special
    pieces, differences = _split(tokens, ("\\setminus", "\\backslash"))
    if differences:
        return _without(pieces)
    pieces, unions = _split(tokens, ("\\cup",))
    if unions:
        return _union(pieces)
    bracketed = _bracketed(tokens)
    if bracketed is not None:
        return bracketed
    ratio, colons = _split(tokens, (":",))
    if colons and not any(token.kind == "word" for token in tokens):
        is_time = any(len(piece) == 1 and _MINUTES.fullmatch(piece[0].text) for piece in ratio[1:])
        return Ratio(tuple(parse_expression(piece) for piece in ratio), is_time)
    try:
        return parse_quantity(tokens)
    except (Unreadable, TooLarge):
        if _is_text(tokens):
            return Words("".join(_bare(token) for token in tokens))
        return Words("".join(token.text for token in tokens))


def _bare(token: Token) -> str:
    """Return the token of a text in lower case; signs that count in a formula are kept."""
    if token.kind == "number" or token.text in "+-*/^=<>!%":
        return token.text
    return _NOT_LETTERS.sub("", token.text).lower()


def _is_text(tokens: list[Token]) -> bool:
    return any(token.kind == "word" for token in tokens) and not any(
        token.kind == "command" for token in tokens
    )


def _special(tokens: list[Token]) -> Answer | None:
    """Read names of sets, numbers in words, and sentences with a meaning of their own."""
    if len(tokens) == 1 and tokens[0].kind == "command":
        if tokens[0].text == "\\emptyset":
            return Unordered(())
        if tokens[0].text == "\\mathbbR":
            return regions.EVERYTHING
        return None
    if not all(token.kind in ("word", "letter") for token in tokens):
        return None
    text = "".join(token.text for token in tokens).lower()
    if text in _NO_SOLUTION:
        return Unordered(())
    if text in _EVERYTHING:
        return regions.EVERYTHING
    if text in _NO_LIMIT:
        return Words("undefined")
    if text in NUMBER_WORDS and len(tokens) == 1:
        return Quantity(Number(Fraction(NUMBER_WORDS[text])), NO_UNIT)
    return None


def _union(pieces: list[list[Token]]) -> Answer:
    items = [_single(piece) for piece in pieces]
    if all(isinstance(item, Unordered) for item in items):
        members: list[Answer] = []
        for item in items:
            assert isinstance(item, Unordered)
            members.extend(item.items)
        return Unordered(tuple(members))
    found = [as_region(item) for item in items]
    if any(region is None for region in found):
        raise Unreadable("A union of other things than intervals.")
    return regions.union([region for region in found if region is not None])


def _without(pieces: list[list[Token]]) -> Answer:
    """Read a region without some points."""
    region = as_region(_single(pieces[0]))
    if region is None:
        raise Unreadable("A difference of other things than intervals and points.")
    for piece in pieces[1:]:
        points = _single(piece)
        if not isinstance(points, Unordered):
            raise Unreadable("A difference of other things than intervals and points.")
        for point in points.items:
            rest = None
            if isinstance(point, Quantity):
                rest = regions.solution([Symbol("x"), point.node], ["\\ne"])
            if rest is None:
                raise Unreadable("A set without something that is no number.")
            region = regions.intersection([region, rest])
    return region


def _set(inside: list[Token]) -> Answer:
    """Read the members of a set, or its condition, as x > 2 in {x | x > 2}."""
    sides, bars = _split(inside, ("|", ":"))
    if len(bars) == 1 and sides[0] and sides[0][0].kind == "letter":
        condition = _answer(sides[1])
        if isinstance(condition, Region):
            return condition
    if bars:
        raise Unreadable("A set with a condition.")
    parts, _ = _split(inside, (",", ";", "and", "or"))
    members: list[Answer] = []
    for part in parts:
        member = _part(part)
        if isinstance(member, Unordered) and _has_two_signs(part):
            members.extend(member.items)
        else:
            members.append(member)
    return Unordered(tuple(members))


def _bracketed(tokens: list[Token]) -> Answer | None:
    """Read (1,2), [1,2), \\{1,2\\} or \\langle 1,2 \\rangle that is the whole part; None if it is no such."""
    if len(tokens) < 2 or tokens[0].text not in ("(", "[", "\\{", "\\langle"):
        return None
    depth = 0
    for position, token in enumerate(tokens):
        if token.text in _OPENING:
            depth += 1
        elif token.text in _CLOSING:
            depth -= 1
            if depth == 0 and position < len(tokens) - 1:
                return None
    inside = tokens[1:-1]
    opening = tokens[0].text
    if opening == "\\{":
        if not inside:
            return Unordered(())
        return _set(inside)
    parts, commas = _split(inside, (",", ";"))
    if not commas:
        return None
    if opening == "\\langle":
        opening = "("
    closing = tokens[-1].text.replace("\\rangle", ")")
    return Ordered(opening, tuple(_part(part) for part in parts), closing)
