"""Check that numbers in the documentation come from recorded results.

    python scripts/check_numbers.py             # print what is not recorded; exit code 1 if there is any
    python scripts/check_numbers.py --transcribe    # record it by hand: benchmarks/results/transcribed.json

Checked are all cells of the tables of docs/performance.md and docs/performance/*.md except the first column.
A number must be, at the digits that are shown, in one of the results that its section names
(benchmarks/results/ or the results/ of an example), or be the ratio of two numbers of its row. The text above
the first heading of the second level is a section too. Numbers of runs whose raw output was not kept are
listed by page and section in transcribed.json: a number that changes without a new record is found. A row of
docs/performance.md links to a page of docs/performance/, which must have every number of the row; the same
holds for a goal with a link. Every number of the tables in README.md, README_zh.md, docs/index.md and
docs/comparison.md must be in the headlines of docs/performance.md.
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
DOCS = ROOT / "docs"
HEADLINES = "performance.md"
SUMMARIES = {
    "README.md": "## Numbers",
    "README_zh.md": "## 实测数据",
    "docs/index.md": "# Strop",
    "docs/comparison.md": "## Speed",
}
"""Pages with a short table of headlines, and the heading above it. The last column is the machine."""
TRANSCRIBED = ROOT / "benchmarks/results/transcribed.json"
LINK = re.compile(r"\]\((performance/\w+\.md)")
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


def pages() -> list[str]:
    """The pages with measurements, below docs/."""
    return [HEADLINES, *sorted(str(path.relative_to(DOCS)) for path in (DOCS / "performance").glob("*.md"))]


def sections(page: str) -> Iterator[tuple[str, str]]:
    """(heading, text) of the beginning of a page and of every section of the second level."""
    for part in re.split(r"^(?=## )", page, flags=re.MULTILINE):
        heading, _, text = part.partition("\n")
        yield heading.strip(), text


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


def unrecorded(text: str, known: set[str]) -> list[str]:
    """Numbers of the tables of a section that neither its results nor `known` have."""
    values = recorded(set(RESULT.findall(text)))
    lacking = set()
    for cells in table_rows(text):
        row = [shown for cell in cells[1:] for shown in numbers(cell)]
        for shown in row:
            if shown.text in known or is_recorded(shown, values) or is_ratio(shown, row):
                continue
            lacking.add(shown.text)
    return sorted(lacking)


def missing() -> dict[str, list[str]]:
    """Numbers that no result has, by page and section."""
    transcribed: dict[str, list[str]] = {}
    if TRANSCRIBED.exists():
        transcribed = json.loads(TRANSCRIBED.read_text())["sections"]
    found: dict[str, list[str]] = {}
    for page in pages():
        for heading, text in sections((DOCS / page).read_text()):
            place = f"{page} {heading}"
            lacking = unrecorded(text, set(transcribed.get(place, [])))
            if lacking:
                found[place] = lacking
    return found


def section(page: str, wanted: str) -> str:
    for heading, text in sections(page):
        if heading == wanted:
            return text
    raise ValueError(f"There is no section {wanted!r}: change its name in scripts/check_numbers.py too.")


def missing_in_details() -> list[str]:
    """Headlines without a link to a page, and numbers of headlines and goals that the page does not have."""
    found = []
    page = (DOCS / HEADLINES).read_text()
    for cells in table_rows(section(page, "## Headlines")):
        link = LINK.search(cells[0])
        if link is None:
            found.append(f"{cells[0]}: no link to a page of docs/performance/")
            continue
        found += missing_on(link[1], " | ".join(cells[1:]))
    for goal in re.split(r"^- ", section(page, "## Goals that were not reached"), flags=re.MULTILINE):
        link = LINK.search(goal)
        if link is not None:
            found += missing_on(link[1], re.sub(r"\(performance/[^)]*\)", "", goal))
    return found


def missing_on(page: str, text: str) -> list[str]:
    there = {shown.text for shown in numbers((DOCS / page).read_text())}
    return [f"{page} does not have {shown.text}" for shown in numbers(text) if shown.text not in there]


def missing_in_headlines() -> list[str]:
    """Numbers of the short tables of other pages that the table of the headlines does not have."""
    headlines = table_rows(section((DOCS / HEADLINES).read_text(), "## Headlines"))
    there = {shown.text for cells in headlines for shown in numbers(" | ".join(cells))}
    found = []
    for page, heading in SUMMARIES.items():
        rows = list(table_rows(section((ROOT / page).read_text(), heading)))
        if not rows:
            raise ValueError(f"{page} has no table below {heading!r}.")
        shown_there = [shown for cells in rows for cell in cells[:-1] for shown in numbers(cell)]
        found += [f"{page}: {shown.text}" for shown in shown_there if shown.text not in there]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transcribe", action="store_true", help="add what is missing to transcribed.json")
    asked = parser.parse_args()
    lacking = missing()
    if asked.transcribe:
        record: dict[str, Any] = {"note": "Printed by runs whose raw output was not kept.", "sections": {}}
        if TRANSCRIBED.exists():
            record = json.loads(TRANSCRIBED.read_text())
        for place, texts in lacking.items():
            record["sections"][place] = sorted({*record["sections"].get(place, []), *texts})
        TRANSCRIBED.write_text(json.dumps(record, indent=1) + "\n")
        return 0
    for place, texts in lacking.items():
        print(f"docs/{place}: no result has {', '.join(texts)}")
    details = missing_in_details()
    for text in details:
        print(f"docs/performance.md: {text}")
    summaries = missing_in_headlines()
    for text in summaries:
        print(f"{text} is not in the headlines of docs/performance.md")
    return int(bool(lacking or details or summaries))


if __name__ == "__main__":
    sys.exit(main())
