"""Packed rows, padded rows and the native engine against single sequences, over many architectures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.conformance import OTHERS, QUICK, Conformance, conformance

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def documented() -> dict[str, list[str]]:
    """The words of the table in docs/models.md, without numbers."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0] in {*QUICK, *OTHERS}:
            found[cells[0]] = [cell.partition(" (")[0] for cell in cells[1:]]
    return found


def check(row: Conformance) -> None:
    # How much is rounding differs from machine to machine.
    found = [cell.replace("rounding", "yes") for cell in row.cells]
    written = [cell.replace("rounding", "yes") for cell in documented()[row.family]]
    assert found == written, "run `python -m tests.models.conformance`"
    assert row.padded.right or row.family == "doge"


@pytest.mark.parametrize("family", QUICK)
def test_it_is_as_documented(family: str) -> None:
    row = conformance(family)
    check(row)
    assert row.cells == ("yes", "yes", "yes"), row


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_this_one_too(family: str) -> None:
    check(conformance(family))


def test_the_page_has_every_architecture_and_most_of_them_have_everything() -> None:
    found = documented()
    assert set(found) == {*QUICK, *OTHERS}
    everything = [family for family, cells in found.items() if set(cells) <= {"yes", "rounding"}]
    assert len(everything) >= 60
