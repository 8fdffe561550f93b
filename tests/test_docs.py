"""The documentation: links lead somewhere, the site's menu names pages that exist, commands are verbs that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from strop import __version__
from strop.cli import PROGRAMS, VERBS
from strop.config.aliases import translate
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.exists(), f"{name_of(page)}: {target}"
        if page.is_relative_to(ROOT / "docs"):
            assert found.resolve().is_relative_to(ROOT / "docs"), (
                f"{name_of(page)}: {target} is not on the site"
            )
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{name_of(page)}: {target}"


def test_every_image_is_shown_by_a_page() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
    }
    kept = {path.resolve() for path in (ROOT / "docs" / "images").rglob("*.*")}
    assert kept == {path for path in shown if path.is_relative_to(ROOT / "docs" / "images")}


def test_the_menu_names_every_page() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = [page for entry in menu for value in entry.values() for page in _pages(value)]
    assert len(pages) == len(set(pages)) > 15
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert set(pages) == there


def _pages(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    assert isinstance(value, list)
    return [page for entry in value for nested in entry.values() for page in _pages(nested)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_verbs(page: Path) -> None:
    for verb in re.findall(r"(?:^|`)strop ([a-z][a-z-]+)\b", page.read_text(), re.MULTILINE):
        assert verb in {*PROGRAMS, "help"}, f"{name_of(page)}: strop {verb}"


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The configuration and the words of every command in a block of code that takes keys."""
    for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(
                r"(?:strop |python3? -m strop\.trainer\.main_)(?:check |plan )?([a-z-]+) (.*)", line
            )
            if found and (found[1] in VERBS or line.startswith("strop plan")):
                yield VERBS.get(found[1], "ppo_trainer"), shlex.split(found[2], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_name_keys_that_exist(page: Path) -> None:
    for root, words in commands(page):
        known = {key.path for key in keys(ROOTS[root])}
        for name in [
            word.partition("=")[0].lstrip("+") for word in words if re.match(r"\+*[a-z_]+(\.\w+)+=", word)
        ]:
            current, _ = translate({name: 0}, root)
            missing = [
                key
                for key in current
                if key not in known and not any(key.startswith(f"{path}.") for path in known)
            ]
            assert not missing, f"{name_of(page)}: {root} has no {missing}"


def test_commands_are_found() -> None:
    assert sum(len(words) for page in PAGES for _, words in commands(page)) > 150


FILES = [
    path.relative_to(ROOT)
    for folder in ("strop", "tests", "benchmarks", "examples", "scripts")
    for path in (ROOT / folder).rglob("*.py")
]
OF_THE_READER = {"my_reward.py", "centred_by_median.py"}
"""Files that a page asks the reader to write."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    missing = []
    for name in re.findall(r"`([\w./]+\.py)`", text):
        found = [file for file in FILES if f"/{file}".endswith(f"/{name}")]
        if not found and name not in OF_THE_READER:
            missing.append(name)
    assert not missing, f"{name_of(page)} names files that do not exist: {missing}"


def test_the_actions_run_what_every_change_must_pass() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert {".ci/run", "make docs", "make test-deploy", "make test-environments"} <= set(steps)


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_templates_of_issues_are_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.parent.name != "ISSUE_TEMPLATE" or path.name == "config.yml":
        return
    assert {"name", "description", "body"} <= set(form)
    fields = [field["id"] for field in form["body"]]
    assert len(fields) == len(set(fields)) >= 3


def test_hooks_and_citation_agree_with_the_project() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    commands_of_hooks = {hook["id"]: hook["entry"] for hook in hooks}
    assert commands_of_hooks["configuration-reference"].endswith("strop config docs --out docs")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert __version__.startswith(citation["version"]) and citation["license"] == "Apache-2.0"


@pytest.mark.parametrize("word", ["docker", "FAQ", "DAPO"])
def test_the_search_of_the_site_finds(word: str) -> None:
    """The site searches titles and texts of the pages in its menu."""
    found = [
        page
        for page in (ROOT / "docs").rglob("*.md")
        if re.search(rf"^#+ .*\b{word}\b", page.read_text(), re.M | re.I)
    ]
    [plugin] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"]
    words = re.split(plugin["search"]["separator"], "algorithm.filter_groups.enable=true top_p=0.95")
    assert found and words == ["algorithm", "filter_groups", "enable", "true", "top_p", "0.95"]


def headings(page: Path) -> list[int]:
    """The levels of the headings, outside of blocks of code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]


def code(page: Path) -> list[str]:
    """The commands and programs, without comments: a translation must have the same ones."""
    found = []
    for language, block in re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = " ".join(re.split(r"(?:^|\s)#", line)[0].split())
            if command and (language or re.match(r"strop |make |python|srun ", command)):
                found.append(command)
    return found


def spans(page: Path) -> set[str]:
    """What stands in backticks outside of blocks of code: keys, values, commands, files."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {span.replace("你的参数", "YOUR ARGUMENTS") for span in re.findall(r"`([^`\n]+)`", text)}


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "zh").glob("*.md")), ids=name_of)
def test_a_chinese_page_has_the_parts_commands_and_keys_of_the_english_one(page: Path) -> None:
    english = ROOT / "docs" / page.name
    assert headings(page) == headings(english)
    assert code(page) == code(english)
    missing = sorted(spans(english) - spans(page))
    surplus = sorted(spans(page) - spans(english))
    assert (missing, surplus) == ([], []), (
        f"{name_of(page)} differs from {name_of(english)}: add {missing}, remove {surplus}"
    )


def test_the_chinese_readme_has_the_commands_and_links_of_the_english_one() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README_zh.md"
    assert code(chinese) == code(english)
    assert spans(english) <= spans(chinese), sorted(spans(english) - spans(chinese))
    links = [
        set(re.findall(r"\]\(((?:docs|examples)/[\w./-]+)", page.read_text())) for page in (english, chinese)
    ]
    translated = {link.replace("docs/", "docs/zh/", 1) for link in links[0]} & links[1]
    assert links[0] - links[1] <= {link.replace("docs/zh/", "docs/") for link in translated}


PRIVATE_WORDS = (
    "beside",
    "told",
    "nobody",
    "taught",
    "lent",
    "parks",
    "parked",
    "goes on",
    "going on",
    "the peer",
    "the peers",
    "the house",
    "mended",
    "anew",
    "one's own",
    "likelier",
)
"""Words and metaphors that a reader of the field would not search for."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL).lower()
    found = [word for word in PRIVATE_WORDS if re.search(rf"\b{word}\b", text)]
    assert found == [], f"{name_of(page)}: say it in plain technical English"


@pytest.mark.parametrize("term", ["docker", "faq", "dapo", "qlora", "resuming", "architecture"])
def test_the_search_finds_a_heading(term: str) -> None:
    titles = [
        title.lower()
        for page in (ROOT / "docs").glob("*.md")
        for title in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    ]
    assert any(term in title for title in titles)
