"""docs/scaling.md shows what the planner says. `python -m tests.planning.test_scaling_page` writes its answers anew."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from strop.trainer.main_plan import run

from .test_measured import table

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
TABLE = re.compile(r"\| shape \| phase \|.*?\n\n", re.DOTALL)
EXAMPLE = re.compile(r"```\n(strop plan (?:[^`]*\\\n)[^`]*?)\n```\n\n```\n([^`]*?)```", re.DOTALL)


def answer(command: str) -> str:
    words = shlex.split(command.replace("\\\n", " "))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run(words[2:])
    return said.getvalue()


def renewed(page: str) -> str:
    page = TABLE.sub(lambda _: table() + "\n\n", page)
    return EXAMPLE.sub(lambda found: f"```\n{found[1]}\n```\n\n```\n{answer(found[1])}```", page)


def test_the_page_shows_what_the_planner_says():
    page = PAGE.read_text()
    assert len(EXAMPLE.findall(page)) == 4
    assert renewed(page) == page, "run `python -m tests.planning.test_scaling_page`"


def test_the_runs_of_the_page_fit_and_the_last_one_does_not():
    answers = [said for _, said in EXAMPLE.findall(PAGE.read_text())]
    assert ["\nfits\n" in said for said in answers] == [True, True, True, False]
    assert "Set " in answers[-1]


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
