"""The documentation: links lead somewhere, the site's menu names pages that exist, commands are verbs that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from strop.cli import PROGRAMS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.exists(), f"{page.name}: {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{page.name}: {target}"


def test_the_menu_names_pages_that_exist() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = [page for entry in menu for value in entry.values() for page in _pages(value)]
    assert len(pages) == len(set(pages)) > 15
    assert [page for page in pages if not (ROOT / "docs" / page).exists()] == []


def _pages(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    assert isinstance(value, list)
    return [page for entry in value for nested in entry.values() for page in _pages(nested)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_verbs(page: Path) -> None:
    for verb in re.findall(r"(?:^|`)strop ([a-z][a-z-]+)\b", page.read_text(), re.MULTILINE):
        assert verb in {*PROGRAMS, "help"}, f"{page.name}: strop {verb}"
