"""The questions of GSM8K with other numbers, and their answers computed anew:

    python examples/qwen_gsm8k/vary.py train.jsonl --out varied.jsonl --versions 4

The solutions of GSM8K contain their calculations as <<48/2=24>>. Numbers of the question that occur in them
are replaced by others of about the same size, the calculations are repeated, and the last result is the
answer. A question is left out if a number of a calculation could come from two places, if the calculations do
not lead to the answer, or if no draw keeps whole results whole and positive ones positive. The rows have the
columns of GSM8K; `answer` is the last line alone.
"""

from __future__ import annotations

import argparse
import json
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
CALCULATION = re.compile(r"<<([^=<>]+)=([^<>]+)>>")
TOKEN = re.compile(rf"(?P<number>{NUMBER.pattern})|(?P<sign>[-+*/()])")
# Not an amount of its own: 1/2, 3:30, 5-year, 2nd, 50%, 10 am.
NO_AMOUNT_BEFORE = re.compile(r"[\w/:.\-#]$")
NO_AMOUNT_AFTER = re.compile(r"[/:%\-\w]|[.,]\d|\s*(?:%|percent|[ap]\.?m\b|o'clock)", re.IGNORECASE)
YEARS = range(1900, 2101)
WORDS = {
    2: "half|halves|twice|double|pair|couple|both",
    3: "third|triple|thrice",
    4: "quarter|fourth",
    5: "fifth|nickel",
    7: "week",
    10: "tenth|dime",
    12: "dozen|year|annual|month|feet|foot|inch",
    24: "day|daily",
    30: "month",
    52: "week|year",
    60: "hour|minute|second",
    100: "percent|%|cent|meter",
}
"""Where one of these words is in the question, a calculation may have the number from the word."""
DRAWS = 60
KEPT = 0.3
"""Chance that one of several numbers stays."""


@dataclass(frozen=True)
class Asked:
    """A number of the question."""

    index: int


@dataclass(frozen=True)
class Result:
    """The result of an earlier calculation."""

    index: int


Token = str | Fraction | Asked | Result
"""A sign or bracket, a constant, or a number that is found elsewhere."""


@dataclass(frozen=True)
class Problem:
    text: tuple[str, ...]
    """The question around its amounts: one piece more than there are amounts."""
    amounts: tuple[Fraction, ...]
    """Numbers of the question that calculations use."""
    calculations: tuple[tuple[Token, ...], ...]
    results: tuple[Fraction, ...]


def value(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))


def amounts_of(question: str) -> dict[Fraction, re.Match[str]]:
    """The numbers of a question that may be replaced: whole ones that occur once, and in no word."""
    found = list(NUMBER.finditer(question))
    times = Counter(value(match.group()) for match in found)
    amounts = {}
    for match in found:
        number = value(match.group())
        whole = number.denominator == 1 and "." not in match.group() and number >= 2
        apart = not NO_AMOUNT_BEFORE.search(question[: match.start()])
        apart = apart and not NO_AMOUNT_AFTER.match(question[match.end() :])
        words = WORDS.get(int(number))
        meant = words is not None and re.search(rf"\b(?:{words})", question, re.IGNORECASE)
        if whole and apart and times[number] == 1 and number not in YEARS and not meant:
            amounts[number] = match
    return amounts


def read(question: str, answer: str) -> Problem | None:
    """None: it is not certain where its numbers come from."""
    final = answer.split("####")[-1].strip().replace(",", "")
    if not final.isdecimal():
        return None
    places = amounts_of(question)
    written = {value(number) for number in NUMBER.findall(question)}
    amounts = sorted(places, key=lambda amount: places[amount].start())
    calculations: list[tuple[Token, ...]] = []
    results: list[Fraction] = []
    used: set[Fraction] = set()
    for expression, result in CALCULATION.findall(answer):
        tokens: list[Token] = []
        rest = expression.replace(" ", "")
        while rest:
            match = TOKEN.match(rest)
            if match is None:
                return None
            rest = rest[match.end() :]
            if match["sign"]:
                tokens.append(match["sign"])
                continue
            number = value(match["number"])
            if number in results and number in written:
                return None
            if number in results:
                tokens.append(Result(results.index(number)))
            elif number in places:
                tokens.append(Asked(amounts.index(number)))
                used.add(number)
            else:
                tokens.append(number)
        if not NUMBER.fullmatch(result.strip()) or compute(tokens, amounts, results) != value(result.strip()):
            return None
        calculations.append(tuple(tokens))
        results.append(value(result.strip()))
    if not used or results[-1] != Fraction(final):
        return None
    text, at = [], 0
    for amount in amounts:
        text.append(question[at : places[amount].start()])
        at = places[amount].end()
    return Problem((*text, question[at:]), tuple(amounts), tuple(calculations), tuple(results))


OPERATIONS: dict[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
}
"""Signs with how tightly they bind."""


def compute(
    tokens: Sequence[Token], amounts: Sequence[Fraction], results: Sequence[Fraction]
) -> Fraction | None:
    """The value of a calculation. None: it has none, or a negative one."""
    rest = list(tokens)

    def number() -> Fraction:
        token = rest.pop(0)
        if token == "(":
            found = terms(1)
            if rest.pop(0) != ")":
                raise IndexError
            return found
        if isinstance(token, str):
            raise IndexError
        if isinstance(token, Fraction):
            return token
        return (amounts if isinstance(token, Asked) else results)[token.index]

    def terms(least: int) -> Fraction:
        found = number()
        while rest and isinstance(rest[0], str) and OPERATIONS.get(rest[0], (0,))[0] >= least:
            binding, operation = OPERATIONS[str(rest.pop(0))]
            found = operation(found, terms(binding + 1))
        return found

    try:
        found = terms(1)
    except (IndexError, ZeroDivisionError):
        return None
    return found if not rest and found >= 0 else None


def other(amount: Fraction, draw: random.Random) -> Fraction:
    """A number of about the same size, and as round."""
    number = int(amount)
    unit = next((unit for unit in (100, 10, 5, 2) if number % unit == 0 and number > 2 * unit), 1)
    least = 2 if unit == 1 else 1
    return Fraction(unit * draw.randint(max(least, number // 2 // unit), max(3, number * 2 // unit)))


def vary(problem: Problem, draw: random.Random) -> tuple[str, str] | None:
    """Another question and its answer. None: no draw gave one with sensible numbers."""
    used = {token.index for tokens in problem.calculations for token in tokens if isinstance(token, Asked)}
    kept = KEPT if len(used) > 1 else 0.0
    for _ in range(DRAWS):
        amounts = []
        for index, amount in enumerate(problem.amounts):
            stays = index not in used or draw.random() < kept
            amounts.append(amount if stays else other(amount, draw))
        if not _same_order(amounts, problem.amounts):
            continue
        answer = _answer(problem, amounts)
        if answer is None or answer == problem.results[-1]:
            continue
        text = problem.text[0]
        for before, amount, piece in zip(problem.amounts, amounts, problem.text[1:], strict=True):
            text += (f"{int(amount):,}" if before >= 1000 else str(amount)) + piece
        return text, str(answer)
    return None


def _same_order(amounts: Sequence[Fraction], before: Sequence[Fraction]) -> bool:
    """Of neighbours, as in "from 3 to 5"."""
    pairs = zip(amounts, amounts[1:], before, before[1:], strict=False)
    return all((a < b) == (c < d) for a, b, c, d in pairs)


def _answer(problem: Problem, amounts: Sequence[Fraction]) -> int | None:
    """None: a result is not whole, or is zero, where it was not before, or has more than two decimals."""
    results: list[Fraction] = []
    for tokens, before in zip(problem.calculations, problem.results, strict=True):
        found = compute(tokens, amounts, results)
        if found is None or (found > 0) != (before > 0) or (found * 100).denominator != 1:
            return None
        if before.denominator == 1 and found.denominator != 1:
            return None
        results.append(found)
    return int(results[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--versions", type=int, default=4, help="of each question, at most")
    asked = parser.parse_args(arguments)
    draw = random.Random(0)
    rows = [json.loads(line) for line in asked.train.read_text(encoding="utf-8").splitlines()]
    followed = written = 0
    with asked.out.open("w", encoding="utf-8") as out:
        for row in rows:
            problem = read(row["question"], row["answer"])
            if problem is None:
                continue
            followed += 1
            made = {vary(problem, draw) for _ in range(asked.versions)} - {None}
            for question, answer in sorted(filter(None, made)):
                written += 1
                out.write(json.dumps({"question": question, "answer": f"#### {answer}"}) + "\n")
    print(f"{asked.out}: {written} questions from {followed} of {len(rows)}")


if __name__ == "__main__":
    main()
