"""YAML that is small on the disk and huge or endless in memory is refused at once, by the name of the file."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from strop.agents.interaction import Interactions
from strop.agents.loops import AgentLoops
from strop.agents.tool_set import read_entries
from strop.config.compose import load
from strop.config.references import refuse_growth, resolve
from strop.config.yaml_files import MAX_DEPTH, limit_exceeded, read_yaml


def aliases(levels: int, width: int = 9) -> str:
    """Each level repeats the one before it `width` times."""
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


def merges(levels: int) -> str:
    lines = ["m0: &m0 {a: 1, b: 2}"]
    for level in range(1, levels):
        lines.append(
            f"m{level}: &m{level} {{<<: [*m{level - 1}, *m{level - 1}], x: [*m{level - 1}, *m{level - 1}]}}"
        )
    return "\n".join(lines)


HOSTILE = {
    "lists": (aliases(20), "aliases"),
    "merged": (merges(40), "aliases"),
    "brackets": ("a: " + "[" * 1000 + "]" * 1000, "levels deep"),
    "open brackets": ("a: " + "[" * 50_000, "levels deep"),
    "braces": ("a: " + "{b: " * 1000 + "1" + "}" * 1000, "levels deep"),
    "indented": ("\n".join(" " * depth + "a:" for depth in range(1000)), "levels deep"),
    "dashes": ("- " * 1000 + "x", "levels deep"),
    "itself": ("a: &a {b: *a}", "inside itself"),
    "not UTF-8": ("a: \udcff", "not UTF-8"),
    "tagged": ("a: !!int ''", "hostile.yaml"),
    "digits": ("a: " + "9" * 5000, "4300"),
}


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    text, words = HOSTILE[request.param]
    file = tmp_path / "hostile.yaml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    return file, words


def test_hostile_files_of_agents(hostile: tuple[Path, str]) -> None:
    file, words = hostile
    start = time.thread_time()  # not the wall clock: other processes may have the processor
    for read in (
        lambda: read_entries(str(file)),
        lambda: AgentLoops.from_config("single_turn_agent", str(file)),
        lambda: Interactions.from_config(str(file)),
    ):
        with pytest.raises(ValueError, match=r"hostile\.yaml") as refusal:
            read()
        assert words in str(refusal.value)
    assert time.thread_time() - start < 5


def test_hostile_configurations(hostile: tuple[Path, str]) -> None:
    file, words = hostile
    with pytest.raises(ValueError, match=r"hostile\.yaml") as refusal:
        load("ppo_trainer", [], str(file))
    assert words in str(refusal.value)


def test_a_hostile_file_in_a_group(tmp_path: Path) -> None:
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "large.yaml").write_text(aliases(20))
    (tmp_path / "mine.yaml").write_text("defaults: [extra: large, _self_]\n")
    with pytest.raises(ValueError, match=r"large\.yaml holds more than"):
        load("ppo_trainer", [], str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("value", ["[" * 1000 + "]" * 1000, "{a:" * 400 + "1" + "}" * 400])
def test_deep_values_on_the_command_line(value: str) -> None:
    with pytest.raises(ValueError, match=r"nested (too deep|more than 200 levels deep)"):
        load("ppo_trainer", [f"data.train_files={value}"])


def doubled(text: str, levels: int = 40) -> dict[str, object]:
    """Keys k0 ... of which each holds `text` with the next key for NEXT; the last one is a text."""
    keys: dict[str, object] = {f"k{level}": text.replace("NEXT", f"k{level + 1}") for level in range(levels)}
    return {**keys, f"k{levels}": "x"}


def as_lists(keys: dict[str, object]) -> dict[str, object]:
    return {key: [value, value] for key, value in keys.items()}


def as_sections(keys: dict[str, object]) -> dict[str, object]:
    return {key: {"a": value, "b": value} for key, value in keys.items()}


DOUBLING: dict[str, dict[str, object]] = {
    "absolute": doubled("${NEXT}${NEXT}"),
    "relative": {"section": doubled("${.NEXT}${.NEXT}")},
    "with spaces": {"section": doubled("${ .NEXT }-${ .NEXT }")},
    "from below": as_sections(doubled("${..NEXT}")),
    "brackets": {"section": doubled("${section[NEXT]}${.[NEXT]}")},
    "lists": as_lists(doubled("${NEXT}")),
    "relative in lists": {"section": as_lists(doubled("${..NEXT}"))},
    "sections": as_sections(doubled("${NEXT}")),
    "select": doubled("${oc.select:NEXT,1}${oc.select:NEXT}"),
    "inside a function": {"section": doubled("${oc.env:NONE,${.NEXT}${.NEXT}}")},
    "fallback of select": {"section": doubled("${oc.select:none,${.NEXT}${.NEXT}}")},
    "long text": {**doubled("${NEXT}${NEXT}", 10), "k10": "x" * 100_000},
    "many keys": {"text": "x" * 1_000_000, "all": {f"k{at}": "${text}" for at in range(1000)}},
}


@pytest.mark.parametrize("tree", DOUBLING.values(), ids=DOUBLING.keys())
def test_references_that_double(tree: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"to more values than a configuration may have \(200,000"):
        resolve(tree)


@pytest.mark.parametrize("text", ["${${name}}${${name}}", "${oc.decode:${a}${b}}", "${oc.create:${a}}"])
def test_computed_references_are_few(text: str) -> None:
    with pytest.raises(ValueError, match=r"references whose key is computed.* at most 12 are allowed"):
        refuse_growth(doubled(text, 13))
    refuse_growth(doubled(text, 4))


def test_references_of_ordinary_configurations_are_resolved() -> None:
    tree: dict[str, object] = {
        "files": ["a", "b"],
        "again": "${files}",
        "name": "x",
        "section": {"x": 3, "next": "${.x}", "other": {"up": "${..x}", "named": "${section.${name}}"}},
        "select": "${oc.select:section.next,5}",
    }
    found = resolve(tree)
    assert found["again"] == tree["files"] and found["select"] == 3
    assert found["section"] == {"x": 3, "next": 3, "other": {"up": 3, "named": 3}}


def test_a_long_list_may_be_named_twice() -> None:
    files = ["a"] * 50_000
    assert resolve({"files": files, "again": "${files}"})["again"] == files


def test_chains_and_circles_of_references() -> None:
    chain: dict[str, object] = {f"k{level}": f"${{k{level + 1}}}" for level in range(2000)}
    with pytest.raises(ValueError, match="chain of more than"):
        refuse_growth(chain)
    refuse_growth({"a": "${b}", "b": "${a}", "c": "${a}${b}"})  # circles have a message of their own


def test_a_file_whose_references_double(tmp_path: Path) -> None:
    lines = [f"k{level}: '${{.k{level + 1}}}${{.k{level + 1}}}'" for level in range(40)]
    inside = "\n".join(f"    {line}" for line in [*lines, "k40: x"])
    (tmp_path / "mine.yaml").write_text(f"data:\n  apply_chat_template_kwargs:\n{inside}\n")
    with pytest.raises(ValueError, match=r"data\.apply_chat_template_kwargs\.k\d+ refers, over other keys"):
        load("ppo_trainer", [], str(tmp_path / "mine.yaml"))


def test_ordinary_aliases_and_depth_are_read(tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text("base: &base {a: 1}\nother: {<<: *base, b: [*base, *base]}\n")
    assert read_yaml(file, "x") == {"base": {"a": 1}, "other": {"a": 1, "b": [{"a": 1}, {"a": 1}]}}
    assert limit_exceeded("[" * MAX_DEPTH + "]" * MAX_DEPTH) is None
    (tmp_path / "mine.yaml").write_text(f"data: {{apply_chat_template_kwargs: {'{a: ' * 40}1{'}' * 40}}}")
    assert load("ppo_trainer", [], str(tmp_path / "mine.yaml")).config.data.apply_chat_template_kwargs


PIECES = [
    "a: ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    "&x ",
    "*x ",
    "<<: ",
    "\n",
    "\n  ",
    "!!python/object:os.system ",
    "!!int ",
    "'",
]
PIECES += [
    '"',
    "|\n",
    "? ",
    "2001-99-99",
    "9" * 5000,
    "1e999",
    "\x00",
    "\ud800",
    "%YAML 9.9\n",
    "---\n",
    "...\n",
    "\t",
    "a",
]


def test_mutated_yaml_gives_a_value_or_a_named_error(tmp_path: Path) -> None:
    """300 files of random pieces of YAML."""
    file = tmp_path / "random.yaml"
    refused = 0
    for case in range(300):
        chance = random.Random(case)
        text = "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 30)))
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            read_yaml(file, str(file))
        except ValueError as error:
            assert "random.yaml" in str(error), f"case {case}"
            refused += 1
    assert refused > 100


def test_files_of_agents_are_read_as_omegaconf_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEARCH", "http://search:8000")
    file = tmp_path / "tools.yaml"
    file.write_text(
        "outer: {mid: &m {<<: &a {x: 1}, x: 2}}\ntop: {<<: *m, y: 1e-3, day: 2026-01-02}\n"
        "url: ${oc.env:SEARCH}/retrieve\nother: ['${oc.env:NOT_SET_HERE, \"a b\"}', '${KEPT}']\n"
    )
    assert read_yaml(file, "x") == {
        "outer": {"mid": {"x": 2}},
        "top": {"x": 2, "y": 0.001, "day": "2026-01-02"},
        "url": "http://search:8000/retrieve",
        "other": ["a b", "${KEPT}"],
    }
    file.write_text("url: ${oc.env:NOT_SET_HERE}\n")
    with pytest.raises(ValueError, match=r"^x reads the environment variable NOT_SET_HERE, which is not set"):
        read_yaml(file, "x")
    file.write_text("tools:\n- a: 1\ntools:\n- b: 2\n")
    with pytest.raises(ValueError, match=r"^x is not YAML: .*found tools twice"):
        read_yaml(file, "x")
