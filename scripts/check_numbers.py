"""Check that numbers in the documentation come from recorded results.

    python scripts/check_numbers.py             # print what is not recorded; exit code 1 if there is any
    python scripts/check_numbers.py --transcribe    # record it by hand: benchmarks/results/transcribed.json

Checked are all cells of the tables of docs/performance.md except the first column. A number must be, at the
digits that are shown, in one of the results that its section names (benchmarks/results/ or the results/ of an
example), or be the ratio of two numbers of its row. Numbers of runs whose raw output was not kept are listed
by section in transcribed.json: a number that changes without a new record is found. Every number of the table
in README.md must stand in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/performance.md"
README = ROOT / "README.md"
TRANSCRIBED = ROOT / "benchmarks/results/transcribed.json"
RESULT = re.compile(r"(?:benchmarks/results|examples/\w+/results)/[\w.]+\.jsonl?")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
NUMBER = re.compile(r"(?<![\w.])(\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?)(k|%|M)?(?![\w])")
SCALES = (1.0, 1e3, 1e-3, 1e6, 1e-6, 1e2, 1 / 2**30)
"""A record in seconds, bytes or tokens is shown in ms, GiB, k or percent."""


@dataclass(frozen=True)
class Shown:
    """A number as it is printed: its value and the half of its last digit."""

    text: str
    value: float
    tolerance: float

    def is_near(self, value: float) -> bool:
        return abs(value - self.value) <= self.tolerance * 1.001


def numbers(text: str) -> Iterator[Shown]:
    for digits, suffix in NUMBER.findall(DATE.sub("", text)):
        plain = digits.replace(",", "")
        mantissa, _, exponent = plain.partition("e")
        decimals = len(mantissa.partition(".")[2])
        tolerance = 0.5 * 10.0**-decimals * 10.0 ** int(exponent or 0)
        if decimals == 0 and not exponent:
            tolerance *= 10.0 ** (len(plain) - len(plain.rstrip("0"))) if len(plain) > 3 else 1
        yield Shown(digits + suffix, float(plain), tolerance)


def sections(page: str) -> Iterator[tuple[str, str]]:
    """(title, text) of every section of the second level."""
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        yield title.strip(), text


def table_rows(text: str) -> Iterator[list[str]]:
    """The cells of every row behind a header."""
    rows = text.splitlines()
    for before, line in zip(["", *rows], rows):
        is_row = line.startswith("|") and before.startswith("|")
        if is_row and not set(line) <= set("|- :"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def recorded(files: set[str]) -> list[float]:
    found: list[float] = []
    for name in sorted(files):
        text = (ROOT / name).read_text()
        lines = text.splitlines() if name.endswith(".jsonl") else [text]
        for line in lines:
            if line.strip():
                found += leaves(json.loads(line))
    return found


def is_recorded(shown: Shown, values: list[float]) -> bool:
    return any(shown.is_near(value * scale) for scale in SCALES for value in values)


def is_ratio(shown: Shown, row: list[Shown]) -> bool:
    others = [other.value for other in row if other is not shown and other.value]
    return any(shown.is_near(scale * a / b) for scale in (1.0, 100.0) for a in others for b in others)


def missing() -> dict[str, list[str]]:
    """Numbers that no result has, by section."""
    transcribed: dict[str, list[str]] = {}
    if TRANSCRIBED.exists():
        transcribed = json.loads(TRANSCRIBED.read_text())["sections"]
    found: dict[str, list[str]] = {}
    for title, text in sections(PAGE.read_text()):
        values = recorded(set(RESULT.findall(text)))
        known = set(transcribed.get(title, []))
        lacking = []
        for cells in table_rows(text):
            row = [shown for cell in cells[1:] for shown in numbers(cell)]
            for shown in row:
                if shown.text in known or is_recorded(shown, values) or is_ratio(shown, row):
                    continue
                lacking.append(shown.text)
        if lacking:
            found[title] = sorted(set(lacking))
    return found


def missing_in_readme() -> list[str]:
    """Numbers of README's table that docs/performance.md does not have."""
    there = {shown.text for shown in numbers(PAGE.read_text())}
    for title, text in sections(README.read_text()):
        if title == "Numbers":
            cells = [row[1] for row in table_rows(text)]
            return [shown.text for cell in cells for shown in numbers(cell) if shown.text not in there]
    raise ValueError("README.md has no section 'Numbers'.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transcribe", action="store_true", help="add what is missing to transcribed.json")
    asked = parser.parse_args()
    lacking = missing()
    if asked.transcribe:
        record: dict[str, Any] = {"note": "Printed by runs whose raw output was not kept.", "sections": {}}
        if TRANSCRIBED.exists():
            record = json.loads(TRANSCRIBED.read_text())
        for title, texts in lacking.items():
            record["sections"][title] = sorted({*record["sections"].get(title, []), *texts})
        TRANSCRIBED.write_text(json.dumps(record, indent=1) + "\n")
        return 0
    for title, texts in lacking.items():
        print(f"docs/performance.md, {title}: no result has {', '.join(texts)}")
    readme = missing_in_readme()
    if readme:
        print(f"README.md: docs/performance.md does not have {', '.join(readme)}")
    return int(bool(lacking or readme))


if __name__ == "__main__":
    sys.exit(main())
