"""Every command of every page is one that its program accepts: keys compose, options parse, files, targets and
extras exist. A page with a program that is not known here fails, so that no new kind of command goes unread."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import json
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import strop as package
from strop import __version__
from strop.cli import PROGRAMS, VERBS
from strop.config.commandline import parse
from strop.config.compose import load
from strop.trainer import main_plan

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
SHELL_BLOCK = re.compile(r"^```(?:bash|sh|shell|console)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
ANY_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")

IN_CAPITALS = re.compile(r"(^|[ /])[A-Z_]{2,}([ /]|$)")
"""A command with a word for the reader to replace: RUN/global_step_60/actor."""
PLACEHOLDERS = {
    "COMMAND": "train_sft --pretrain DIR --dataset train.jsonl",
    "KEY": "trainer.total_epochs",
    "K": "1",
    "SCRIPT.py": "train.py",
    "$MODEL": "Qwen/Qwen2.5-0.5B-Instruct",
}
"""Words of the pages in capitals, and what a reader may write for them."""
NAMED = {"data": "gsm8k", "config": "ppo"}
"""What NAME stands for, by verb."""
OMITTED = re.compile(r"\.\.\.|KEY=VALUE|key=value|KEY|YOUR|ARGUMENTS|.*[^\x00-\x7f].*")
"""Words that stand for arguments of the reader."""

TRL_SCRIPT = """
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(model="m", args=GRPOConfig(learning_rate=1e-6), train_dataset="d", reward_funcs=len)
trainer.train()
"""
OF_THE_READER = {
    "my_run.yaml": "trainer:\n  total_epochs: 2\n",
    "run.yaml": "trainer:\n  total_epochs: 2\n",
    "train.py": TRL_SCRIPT,
}
"""Files that a page asks the reader to write."""


@dataclass(frozen=True)
class Command:
    """One command of a page, with the number of its line for messages."""

    text: str
    is_mention: bool = False
    """A code span such as `strop merge`: it names a program and is not a whole command."""


def spans(text: str) -> Iterator[Command]:
    """Commands inside sentences and cells of tables."""
    for span in CODE_SPAN.findall(ANY_BLOCK.sub("", text)):
        for line in " ".join(span.replace("\\|", "|").split()).split(" && "):
            first = line.partition(" ")[0]
            if first in READERS and line != first:
                yield Command(line, is_mention=len(line.split()) == 2 and "=" not in line)


def blocks(text: str) -> Iterator[Command]:
    """Commands of code blocks: lines whose first word is a program. Other lines are output or listings."""
    for block in SHELL_BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r" (?:&&|\|\|) ", line.removeprefix("$ ")):
                words = re.sub(r"^(?:[A-Z_]+=(?:\$\([^)]*\)|\S*) )+", "", part).removeprefix("srun ")
                if words.partition(" ")[0] in {*READERS, *NOT_OURS}:
                    yield Command(words)
                elif re.match(r"(?!make|docker)[a-z][a-z0-9-]+ (?:-[a-z-]|[a-z_.]+=)", words):
                    raise AssertionError(f"unknown program: {words}")


def words_of(command: Command) -> Iterator[list[str]]:
    """The command with each of its alternatives (sft|rm|dpo), and a value behind each option."""
    choices: list[list[str]] = []
    before = ""
    for word in shlex.split(command.text, comments=True):
        if word == "..." and before.startswith("--") and len(before) > 2:
            word = "VALUE"
        before = word
        bare = word.strip("[]") if re.fullmatch(r"\[[^=\[\]]*|[^=\[\]]*\]|\[[^\[\]]+\]", word) else word
        if re.fullmatch(r"[\w-]+(\|[\w-]+)+", bare):
            choices.append(bare.split("|"))
        else:
            choices.append([PLACEHOLDERS.get(bare, bare)])
    for chosen in itertools.product(*choices):
        yield shlex.split(
            " ".join(shlex.quote(word) if " " not in word or "{" in word else word for word in chosen)
        )


def given(words: list[str]) -> list[str]:
    return [word for word in words if not OMITTED.fullmatch(word) and word != "file.yaml"]


class Parsed(Exception):
    """Raised in place of what a program does after it has read its options."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse reads the options as always; then the program ends."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, *arguments, **options):
        raise Parsed(real(self, *arguments, **options))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)


COMPOSED: set[tuple[str, ...]] = set()


def compose(root: str, words: list[str]) -> None:
    """Once for each command: translations repeat them."""
    key = (root, *words)
    if key not in COMPOSED:
        found = parse(given(words), switches=("--json",))
        load(root, found.overrides, found.config, found.search)
        COMPOSED.add(key)


def strop(words: list[str]) -> None:
    verb, *rest = words
    if verb in ("help", "--help"):
        return
    assert verb in PROGRAMS, f"strop {verb}"
    rest = [NAMED.get(verb, word) if word == "NAME" else word for word in rest]
    if verb == "eval" and "--compare" in rest:
        at = rest.index("--compare")
        assert all(name.endswith(".parquet") for name in rest[at + 1 : at + 3])
        compose("evaluation", [*rest[:at], *rest[at + 3 :]])
    elif verb in VERBS:
        compose(VERBS[verb], rest)
    elif verb == "check":
        compose(VERBS[rest[0]], rest[1:])
    elif verb == "plan":
        kept, options = main_plan._options(given(rest))
        main_plan.device_of(options.get("--gpu", main_plan.OTHER))
        root = main_plan.ROOTS[kept.pop(0)] if kept and kept[0] in main_plan.ROOTS else "ppo_trainer"
        compose(root, kept)
    elif verb == "openrlhf":
        assert PROGRAMS["convert"](["openrlhf", *given(rest)]) == 0
    elif rest == ["openrlhf"] or rest[-1:] == ["trainer.greeting"]:
        return  # a family of commands, and the key that CONTRIBUTING.md adds as an example
    elif rest[:3] == ["verl", "--to", "openrlhf"]:
        compose("ppo_trainer", rest[3:])
    elif verb in ("config", "convert"):
        assert rest[:2] == ["docs", "--out"] or PROGRAMS[verb](given(rest)) == 0
    else:
        with pytest.raises(Parsed):
            PROGRAMS[verb](given(rest))


def python(words: list[str]) -> None:
    """A script of the repository with its options, a module of an installed package, or a line of code."""
    if words[0] == "-c":
        compile(words[1], "page", "exec")
    elif words[0] == "-m":
        module(words[1], words[2:])
    else:
        assert Path(words[0]).is_file(), f"{words[0]} does not exist"
        if len(words) > 1:
            options_of(words)


def module(name: str, words: list[str]) -> None:
    """`python -m strop.trainer.main_ppo` takes the words of `strop ppo`."""
    package = name.partition(".")[0]
    if package in OTHER_PACKAGES:
        return
    assert importlib.util.find_spec(name) is not None, name
    if ".main_" not in name:
        assert words == [], name
        return
    verb = name.rpartition(".main_")[2]
    roots = {"generation": "generation", "generation_server": "generation", "eval": "evaluation"}
    compose(roots.get(verb, VERBS.get(verb, "")), words)


def options_of(words: list[str]) -> None:
    """The script reads its options and ends."""
    before = sys.argv, list(sys.path)
    sys.argv = words
    sys.path[:0] = [str(ROOT), str(ROOT / Path(words[0]).parent)]
    try:
        with pytest.raises(Parsed):
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        rule = rf"^{re.escape(name)} *\?=" if is_variable else rf"^{re.escape(name)}:"
        assert re.search(rule, text, re.MULTILINE), f"the Makefile has no {name}"


def pip(words: list[str]) -> None:
    """Extras of strop exist, the wheel has this version, files of -c exist."""
    assert words[0] == "install", words
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for before, word in itertools.pairwise(words):
        if before in ("-c", "-r"):
            assert (ROOT / word).is_file(), word
        found = re.fullmatch(r"(?:strop(?:-([\d.]+)-py3-none-any\.whl)?|\.)(?:\[([\w,]+)\])?", word)
        if found is None:
            assert before in ("-c", "-r", "--index-url") or word.startswith("-") or word in FROM_AN_INDEX, (
                word
            )
            continue
        assert found[1] is None or __version__.startswith(found[1])
        extras = [] if found[2] is None else found[2].split(",")
        assert set(extras) <= project["optional-dependencies"].keys(), word


def docker(words: list[str]) -> None:
    """Stages exist; what an image runs is a command of ours."""
    stages = re.findall(r"^FROM .* AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    if words[0] == "build":
        assert words[words.index("--target") + 1] in stages, words
        return
    assert words[0] == "run", words
    [place] = [index for index, word in enumerate(words) if word.startswith("strop:")]
    assert words[place].partition(":")[2] in stages
    run(words[place + 1 :])


def torchrun(words: list[str]) -> None:
    place = words.index("-m")
    assert all(word.startswith("--") or word == "VALUE" for word in given(words[:place]))
    module(words[place + 1], words[place + 2 :])


def applied_file(words: list[str]) -> None:
    """`ray up FILE`, `sky launch FILE`, `kubectl apply -f FILE`, `sbatch FILE`."""
    for word in words:
        assert "examples/" not in word or Path(word).is_file(), f"{word} does not exist"


READERS: dict[str, Callable[[list[str]], None]] = {
    "strop": strop,
    "python": python,
    "python3": python,
    "make": make,
    "pip": pip,
    "docker": docker,
    "torchrun": torchrun,
    "ray": applied_file,
    "sky": applied_file,
    "kubectl": applied_file,
    "sbatch": applied_file,
}
NOT_OURS = ("source", "less", "ssh", "scontrol", "cd", "{", ".venv/bin/pytest", "git")
"""Programs of the system, whose arguments are the reader's."""
OTHER_PACKAGES = ("verl", "vllm", "tinker_cookbook")
FROM_AN_INDEX = ("pre-commit", "torch", "verifiers[ta]")


def run(words: list[str]) -> None:
    READERS[words[0]](words[1:])


def commands(page: Path) -> list[Command]:
    text = page.read_text()
    return [command for command in [*blocks(text), *spans(text)] if command.text.split()[0] in READERS]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a reader: the repository's folders, and what a page asks to write."""
    for folder in ("examples", "benchmarks", "scripts"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for name, text in OF_THE_READER.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


WITH_COMMANDS = [page for page in PAGES if page.name != "recipes.md" and commands(page)]
"""tests/examples/test_recipes.py composes and checks the recipes."""


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
@pytest.mark.usefixtures("reader", "parse_only")
def test_every_command_of_a_page_is_accepted(page: Path) -> None:
    if page.is_relative_to(ROOT / "examples"):  # its commands are given in its own folder
        for file in page.parent.glob("*.yaml"):
            Path(file.name).symlink_to(file)
    for command in commands(page):
        program, *rest = command.text.split()
        if command.is_mention and program == "strop":
            assert rest[0].startswith("--") or rest[0].rstrip(".") in PROGRAMS, (
                f"{name_of(page)}: {command.text}"
            )
        elif not (command.is_mention and program in ("ray", "docker", "pip")):
            for words in words_of(command):
                try:
                    run(words)
                except (Exception, SystemExit) as error:
                    raise AssertionError(f"{name_of(page)}: {command.text}: {error}") from error


def code_blocks(language: str) -> list[tuple[Path, str]]:
    pattern = re.compile(rf"^( *)```{language}\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    return [(page, textwrap.dedent(body)) for page in PAGES for _, body in pattern.findall(page.read_text())]


def test_the_code_of_the_pages_parses_and_imports_what_exists() -> None:
    found = code_blocks("python")
    assert len(found) > 30
    for page, body in found:
        if page.name in ("api.md", "porting_trl.md"):  # signatures; two programs side by side
            continue
        part = textwrap.dedent(re.sub(r"^# in .*\n", "", body))  # a part of a class is indented
        for node in ast.walk(ast.parse(part, filename=name_of(page))):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "strop":
                module_of_page = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module_of_page, alias.name), f"{name_of(page)}: {node.module}.{alias.name}"
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "strop"
            ):
                assert hasattr(package, node.attr), f"{name_of(page)}: strop.{node.attr}"


def test_the_yaml_and_json_of_the_pages_parse() -> None:
    found = [*code_blocks("yaml"), *code_blocks("json")]
    assert len(found) >= 5
    for page, body in found:
        assert yaml.safe_load(body) is not None, name_of(page)


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
def test_the_commands_about_a_run_can_be_followed() -> None:
    """A quickstart of 60 steps, merge, generate, eval and compare as they are printed; then profile and doctor."""
    pages = [ROOT / "docs" / "generation_evaluation.md", ROOT / "docs" / "watching.md"]
    found = [command.text for page in pages for command in blocks(page.read_text())]
    followed = [
        text for text in found if not IN_CAPITALS.search(text) and "replay" not in text and "..." not in text
    ]
    verbs = []
    for text in followed:
        _, verb, *words = shlex.split(text, comments=True)
        assert PROGRAMS[verb](words) == 0, text
        verbs.append(verb)
    assert verbs == ["quickstart", "merge", "generate", "generate", "eval", "eval", "profile", "doctor"]
    compared = json.loads(Path("trained.compare.json").read_text())["sources"]["arithmetic"]
    assert "difference" in json.dumps(compared)
