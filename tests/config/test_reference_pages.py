"""The pages of the configuration reference are fresh, complete, and every section has an anchor of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strop.cli import main
from strop.config.reference_pages import FOLDER, TITLES, pages, write_pages
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_in_docs_are_fresh() -> None:
    written = {f"{FOLDER}.md": (DOCS / f"{FOLDER}.md").read_text()}
    for path in (DOCS / FOLDER).glob("*.md"):
        written[f"{FOLDER}/{path.name}"] = path.read_text()
    assert written == pages(), "run `.venv/bin/strop config docs --out docs`"


@pytest.mark.parametrize("page", TITLES)
def test_every_section_of_a_page_has_one_anchor(page: str) -> None:
    titles = re.findall(r"^#+ (.+)$", pages()[f"{FOLDER}/{page}.md"], re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    assert len(anchors) == len(set(anchors)) >= 1


def test_every_key_of_training_is_on_one_page() -> None:
    found = []
    for name, text in pages().items():
        if not name.startswith(f"{FOLDER}/ppo_"):
            continue
        for part in text.split("\n## ")[1:]:
            section = part.partition("\n")[0]
            prefix = "" if section == "Top level" else f"{section}."
            found += [f"{prefix}{key}" for key in re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)]
    assert sorted(found) == sorted(key.path for key in keys(ROOTS["ppo_trainer"]))


def test_a_page_that_is_no_longer_generated_is_deleted(tmp_path: Path) -> None:
    old = tmp_path / FOLDER / "gone.md"
    old.parent.mkdir()
    old.write_text("old")
    assert sorted(write_pages(tmp_path)) == sorted(tmp_path / name for name in pages())
    assert not old.exists()


def test_the_command_without_a_folder_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "docs"]) == 1
    assert "docs --out docs" in capsys.readouterr().err
