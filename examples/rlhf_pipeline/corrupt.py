"""Worked solutions of GSM8K with a mistake in them, always the same for the same row: what a reward model
should see through.

A solution calculates in marks, `48+24 = <<48+24=72>>72`, and ends with `#### 72`.
"""

from __future__ import annotations

import random
import re

MARK = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def corrupt(solution: str, index: int) -> str:
    """The solution of row `index`, made wrong in one of three ways."""
    chance = random.Random(index)
    return chance.choice([slip, stop_early, misread])(solution, chance)


def slip(solution: str, chance: random.Random) -> str:
    """The last calculation comes out wrong, and so does the answer."""
    marks = list(MARK.finditer(solution))
    right = solution.rpartition("####")[2].strip()
    if not marks or marks[-1][2] != right:
        return misread(solution, chance)
    start, wrong = marks[-1].start(2), another(right, chance)
    return solution[:start] + whole(right).sub(wrong, solution[start:])


def stop_early(solution: str, chance: random.Random) -> str:
    """The last step is missing, and the result before it is given as the answer."""
    steps, _, final = solution.rpartition("####")
    kept = steps.strip().split("\n")[:-1]
    results = MARK.findall("\n".join(kept))
    if not results or not NUMBER.fullmatch(results[-1][1]) or results[-1][1] == final.strip():
        return misread(solution, chance)
    return "\n".join([*kept, f"#### {results[-1][1]}"])


def misread(solution: str, chance: random.Random) -> str:
    """All steps are right, but the answer is another number."""
    steps, _, final = solution.rpartition("####")
    return f"{steps}#### {another(final.strip(), chance)}"


def another(number: str, chance: random.Random) -> str:
    """A number near this one, but never it.

    >>> another("72", random.Random(0)) != "72"
    True
    """
    value = float(number.replace(",", ""))
    step = chance.choice([1, 2, 10, max(1, round(abs(value) / 2))])
    return f"{value + chance.choice([-step, step]):.12g}"


def whole(number: str) -> re.Pattern[str]:
    """The number where it is not a part of another."""
    return re.compile(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)")
