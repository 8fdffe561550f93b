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
from strop.config.yaml_files import MAX_DEPTH, limit_exceeded, read_yaml, refuse_growth


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
    start = time.monotonic()
    for read in (
        lambda: read_entries(str(file)),
        lambda: AgentLoops.from_config("single_turn_agent", str(file)),
        lambda: Interactions.from_config(str(file)),
    ):
        with pytest.raises(ValueError, match=r"hostile\.yaml") as refusal:
            read()
        assert words in str(refusal.value)
    assert time.monotonic() - start < 5


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
    with pytest.raises(ValueError, match="nested too deep"):
        load("ppo_trainer", [f"data.train_files={value}"])


def test_references_that_double() -> None:
    doubled = {f"k{level}": f"${{k{level + 1}}}${{k{level + 1}}}" for level in range(40)}
    with pytest.raises(ValueError, match=r"to more than 10,000 values"):
        refuse_growth({**doubled, "k40": "x"})
    chain = {f"k{level}": f"${{k{level + 1}}}" for level in range(2000)}
    with pytest.raises(ValueError, match="chain of more than"):
        refuse_growth(chain)
    refuse_growth({"a": "${b}", "b": "${a}", "c": "${a}${b}"})  # circles have a message of their own


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
