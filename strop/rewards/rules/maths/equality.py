"""Whether two answers are equal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from strop.rewards.rules.maths.answers import MAX_LENGTH, readings
from strop.rewards.rules.maths.nodes import Apply, Node, Number, Symbol, TooLarge, Undefined
from strop.rewards.rules.maths.quantities import APPROXIMATE_DIGITS, Quantity, same_quantity
from strop.rewards.rules.maths.regions import Region, same_region
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
from strop.rewards.rules.maths.values import evaluate, identical, proportional

Match = Literal["exact", "approximate", "none"]
MAX_PAIRS = 400
MAX_WRITTEN_BITS = 14_000
_PLAIN = re.compile(
    r"(-?)(?:([0-9]{1,100}(?:\.[0-9]{1,100})?)"
    r"|\\[dt]?frac\{([0-9]{1,100})\}\{([0-9]{1,100})\}|([0-9]{1,100})/([0-9]{1,100}))"
)
"""A number or a fraction in the usual spelling: most answers need no more."""
_LABELLED = re.compile(
    r"\(?([A-J])[).:](?! ?(?:[,;/&+]|(?:or|and)\b) ?\(?[A-J]\b)(?! ?\(?[A-J](?:[).:]|\Z)) ?(.*)", re.DOTALL
)
"""One letter with its text; behind another letter there are several."""
_CALLED = re.compile(r"(?i)^(?:the )?(?:option|choice|letter) ")
_LETTER = re.compile(r"\(?([A-Za-z])\)?")
_FONT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textrm|mbox) ?\{([^{}]*)\}")


def compare(answer: str, truth: str) -> Match:
    """Return whether the answer is the reference: exactly, as a decimal of many digits, or not.

    >>> compare("0.25", "\\\\frac{1}{4}"), compare("6.2831853", "2\\\\pi"), compare("1,2", "12")
    ('exact', 'approximate', 'none')
    """
    answer = answer.strip()
    truth = truth.strip()
    if answer == truth:
        return "exact"
    value = _plain_value(answer)
    if value is not None:
        expected = _plain_value(truth)
        if expected is not None:
            return "exact" if value == expected else "none"
    if max(len(answer), len(truth)) > MAX_LENGTH:
        return "none"
    if _same_choice(answer, truth):
        return "exact"
    found: Match = "none"
    for one in readings(answer):
        for other in readings(truth):
            match = _match(one, other)
            if match == "exact":
                return match
            if match == "approximate":
                found = match
    return found


def _plain_value(text: str) -> Fraction | None:
    """Return the value of a number or fraction in the usual spelling; None for anything else."""
    found = _PLAIN.fullmatch(text)
    if found is None:
        return None
    value = Fraction(found[2] or found[3] or found[5])
    divisor = int(found[4] or found[6] or "1")
    if divisor == 0:
        return None
    if found[1]:
        value = -value
    return value / divisor


def equal(answer: str, truth: str) -> bool:
    """Whether the answer is the reference, exactly or as a decimal of many digits."""
    return compare(answer, truth) != "none"


def canonical(answer: str) -> str:
    """Return one spelling for answers that are equal as numbers; others are only cleaned.

    >>> canonical("0.50"), canonical("\\\\frac{2}{4}"), canonical("x + 1")
    ('1/2', '1/2', 'x+1')
    """
    plain = _plain_value(answer.strip())
    if plain is not None:
        return str(plain)
    if len(answer) > MAX_LENGTH:
        return answer.strip()
    for reading in readings(answer):
        if isinstance(reading, Named):
            reading = reading.value
        if isinstance(reading, Quantity):
            try:
                value = evaluate(reading.node)
            except (Undefined, TooLarge):
                break
            if isinstance(value, Fraction) and _is_short(value):
                return str(value)
        break
    return clean(answer).replace(" ", "")


def _is_short(value: Fraction) -> bool:
    """Whether the digits can be written: Python refuses integers of more than 4,300 digits."""
    return max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_WRITTEN_BITS


def _same_choice(answer: str, truth: str) -> bool:
    """Whether the reference is a letter, and the answer is that letter with brackets or with its text."""
    letter = _letter(truth)
    if letter is None:
        return False
    plain = _plain(answer)
    labelled = _LABELLED.fullmatch(plain)
    if labelled:
        return labelled[1] == letter
    return _letter(answer) == letter


def _plain(text: str) -> str:
    return _CALLED.sub("", _FONT.sub(r"\1", clean(text)).strip())


def _letter(text: str) -> str | None:
    found = _LETTER.fullmatch(_plain(text))
    if found:
        return found[1]
    return None


def _match(answer: Answer, truth: Answer) -> Match:
    if isinstance(answer, Statement) and answer.value is not None and isinstance(truth, Quantity):
        answer = answer.value  # a reference of this form is an equation, and 5 is no answer to it
    try:
        if _equal(answer, truth):
            return "exact"
        if _approximate(answer, truth):
            return "approximate"
    except (Undefined, TooLarge):
        return "exact" if answer == truth else "none"
    return "none"


def _approximate(answer: Answer, truth: Answer) -> bool:
    one = _bare(answer)
    other = _bare(truth)
    if not isinstance(one, Quantity) or not isinstance(other, Quantity) or one.unit != other.unit:
        return False
    return one.rounds(other, digits=APPROXIMATE_DIGITS) or other.rounds(one, digits=APPROXIMATE_DIGITS)


def _bare(answer: Answer) -> Answer:
    if isinstance(answer, Named):
        return answer.value
    return answer


def _equal(left: Answer, right: Answer) -> bool:
    if isinstance(left, Contradiction) or isinstance(right, Contradiction):
        return False
    if isinstance(left, Quantity) and isinstance(right, Quantity):
        return same_quantity(left, right)
    if isinstance(left, Words) and isinstance(right, Words):
        return left == right
    if isinstance(left, Named) or isinstance(right, Named):
        return _equal_named(left, right)
    if isinstance(left, Statement) and isinstance(right, Statement):
        return _same_statement(left, right)
    if isinstance(left, Unordered) or isinstance(right, Unordered):
        return _equal_several(left, right)
    if isinstance(left, Region) or isinstance(right, Region):
        one = as_region(left)
        other = as_region(right)
        return one is not None and other is not None and same_region(one, other)
    return _equal_in_order(left, right)


def _equal_in_order(left: Answer, right: Answer) -> bool:
    """Compare tuples, intervals, matrices and ratios."""
    if isinstance(left, Ordered) and isinstance(right, Ordered):
        if (left.opening, left.closing) != (right.opening, right.closing):
            return False
        return _all_equal(left.items, right.items)
    if isinstance(left, Matrix) and isinstance(right, Matrix):
        if len(left.rows) != len(right.rows):
            return False
        return all(_all_equal(one, other) for one, other in zip(left.rows, right.rows))
    if isinstance(left, Ratio) or isinstance(right, Ratio):
        return _same_ratio(left, right)
    return False


def _all_equal(left: Sequence[Answer], right: Sequence[Answer]) -> bool:
    return len(left) == len(right) and all(_equal(one, other) for one, other in zip(left, right))


def _same_ratio(left: Answer, right: Answer) -> bool:
    one = _terms(left)
    other = _terms(right)
    if not one or len(one) != len(other):
        return False
    if any(isinstance(ratio, Ratio) and ratio.is_time for ratio in (left, right)):
        return all(identical(*terms) for terms in zip(one, other))
    for index in range(1, len(one)):
        crossed = Apply("*", (one[0], other[index]))
        if not identical(crossed, Apply("*", (one[index], other[0]))):
            return False
    return True


def _terms(answer: Answer) -> tuple[Node, ...]:
    """Return the terms of a ratio; a number is its ratio to 1."""
    if isinstance(answer, Ratio):
        return answer.items
    if isinstance(answer, Quantity):
        return (answer.node, Number(Fraction(1)))
    return ()


def _equal_named(left: Answer, right: Answer) -> bool:
    """Compare x = 5 with 5, with x = 5, and with an equation in x."""
    if isinstance(left, Named) and isinstance(right, Named):
        return left.name == right.name and _equal(left.value, right.value)
    if isinstance(right, Named):
        left, right = right, left
    assert isinstance(left, Named)
    if isinstance(right, Statement):
        if not isinstance(left.value, Quantity):
            return False
        difference = Apply("-", (Symbol(left.name), left.value.node))
        return _same_statement(Statement("=", difference), right)
    return _equal(left.value, right)


def _same_statement(left: Statement, right: Statement) -> bool:
    if left.relation != right.relation:
        return False
    return proportional(left.difference, right.difference, positive=left.relation in ("<", "\\le"))


def _equal_several(left: Answer, right: Answer) -> bool:
    """Compare as sets; one answer is a set of one."""
    for collection, other_side in ((left, right), (right, left)):
        if isinstance(other_side, Ordered) and _values_by_name(collection):
            return _all_equal(_values_by_name(collection), other_side.items)
    one = _items(left)
    other = _items(right)
    if len(one) * len(other) > MAX_PAIRS:
        return left == right
    return _contains(one, other) and _contains(other, one)


def _items(answer: Answer) -> tuple[Answer, ...]:
    if isinstance(answer, Unordered):
        return answer.items
    return (answer,)


def _contains(items: tuple[Answer, ...], others: tuple[Answer, ...]) -> bool:
    return all(any(_match(item, other) == "exact" for item in items) for other in others)


def _values_by_name(answer: Answer) -> tuple[Answer, ...]:
    """Return the values of x = 1, y = 2 in the order of the names; nothing if they are not all named."""
    items = _items(answer)
    named = [item for item in items if isinstance(item, Named)]
    if len(named) < len(items) or len({item.name for item in named}) < len(items):
        return ()
    return tuple(item.value for item in sorted(named, key=lambda item: item.name))
