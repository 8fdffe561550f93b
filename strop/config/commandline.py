"""Parses the part of a command line that chooses a configuration: Hydra's options, a YAML file, overrides."""

from __future__ import annotations

import re
import shlex
import sys
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.config.aliases import flatten, nest
from strop.config.typed import ConfigError

_OPTIONS = {
    "--config-name": "config",
    "-cn": "config",
    "--config-path": "search",
    "-cp": "search",
}
_MORE_FOLDERS = ("--config-dir", "-cd")
SEARCH_PATH = "hydra.searchpath="
_FOLDER = re.compile(r"""'file://([^']+)'|"file://([^"]+)"|file://([^'",\]]+)""")
_HELP = """usage: [FILE.yaml] [--config-name NAME] [--config-path DIR] [--config-dir DIR] [key=value ...]

Settings are written key=value. `strop config show NAME` lists them with their documentation,
`strop config explain KEY` explains one, `strop help` lists the commands.
"""
_REFUSED = {
    "--multirun": "sweeps are not supported; start one run per value",
    "-m": "sweeps are not supported; start one run per value",
    "--cfg": "use `strop config show`",
    "-c": "use `strop config show`",
}


@dataclass
class ConfigArguments:
    """Overrides, the name and folder of a YAML file, and switches such as --json."""

    overrides: list[str] = field(default_factory=list)
    config: str | None = None
    search: str | None = None
    switches: set[str] = field(default_factory=set)


def parse(arguments: Sequence[str], switches: Sequence[str] = ()) -> ConfigArguments:
    """`key=value` overrides, `--config-name`, `--config-path`, one YAML file by its path, and the named
    switches."""
    asked = ConfigArguments()
    more: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _OPTIONS or name in _MORE_FOLDERS:
            if not equals:
                if not rest:
                    raise ConfigError(f"{name} needs a value.")
                value = rest.pop(0)
            if name in _MORE_FOLDERS:
                more.append(_place(name, value))
            else:
                setattr(asked, _OPTIONS[name], value)
        elif word in ("--help", "-h"):
            sys.stdout.write(_HELP)
            raise SystemExit(0)
        elif word in switches:
            asked.switches.add(word)
        elif name in _REFUSED:
            raise ConfigError(f"{name}: {_REFUSED[name]}.")
        elif word.startswith("-"):
            raise ConfigError(f"{word}: no such option. Settings are written key=value, without dashes.")
        elif not equals and word.endswith((".yaml", ".yml")):
            asked.config = word
        else:
            asked.overrides.append(word)
    if more:
        if any(text.lstrip("+").startswith(SEARCH_PATH) for text in asked.overrides):
            raise ConfigError(
                f"--config-dir and {SEARCH_PATH} are one setting. Write all folders into the latter, as "
                f"{SEARCH_PATH}[file:///one,file:///two]."
            )
        asked.overrides.append(f"{SEARCH_PATH}[{','.join(more)}]")  # Hydra reads the first such override
    return asked


def _place(option: str, value: str) -> str:
    """A folder as Hydra's search path names it."""
    folder = Path(value).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"{option}: there is no folder {folder}.")
    quote = '"' if "'" in str(folder) else "'"
    return f"{quote}file://{folder}{quote}"


def searched_folders(overrides: Sequence[str]) -> list[Path]:
    """The folders that overrides of hydra.searchpath name."""
    found: list[Path] = []
    for text in overrides:
        if text.lstrip("+").startswith(SEARCH_PATH):
            found += [Path("".join(forms)) for forms in _FOLDER.findall(text)]
    return [folder for folder in found if folder.is_dir()]


_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*|(\d+\.\d*|\.\d+)([eE][+-]?\d+)?|\d+[eE][+-]?\d+)")
_WORD = re.compile(r"[A-Za-z/.][\w./@:%+-]*")
_LIST = re.compile(r"\[[^\[\]{}()]+\]")
COMMAND_KEY = "rollout.agent.command"
_SPECIAL = {"true": True, "false": False, "null": None}
_DIGITS = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d[\d_]*)?")

_ENVIRONMENT = re.compile(r"\b(runtime_env\.env_vars|worker_env)\.")
_VARIABLE = re.compile(r"[\w.+-]+")


def environment_as_text(leaves: Mapping[str, object]) -> dict[str, object]:
    """The leaves, with variables of an environment as text; those that are null are left out."""
    found: dict[str, object] = {}
    for path, value in leaves.items():
        if not _ENVIRONMENT.search(path):
            found[path] = value
        elif isinstance(value, bool):
            found[path] = str(value).lower()
        elif value is not None:
            found[path] = str(value)
    return found


def quote_digits(text: str, type_of: Callable[[str], object]) -> str:
    """Quote digits where the key takes text, so that they stay as they are written: to Hydra 2026_11_18 is
    the number 20261118, 1.10 is 1.1, and the band 0.5_5 is 0.55. So are words that are variables of an
    environment. `type_of`: the type of a key.

    >>> quote_digits("trainer.experiment_name=1.10", lambda path: str)
    "trainer.experiment_name='1.10'"
    """
    path, _, value = text.partition("=")
    if _ENVIRONMENT.search(path) and _VARIABLE.fullmatch(value) and value.lower() != "null":
        return f"{path}='{value}'"
    wanted = type_of(path.lstrip("+"))
    options = typing.get_args(wanted) or (wanted,)
    if str not in options or not _DIGITS.fullmatch(value):
        return text
    takes_numbers = int in options or float in options
    if takes_numbers and not (float in options and "_" in value):
        return text
    return f"{path}='{value}'"


def quote_command(text: str) -> str:
    """Quote the value of a key that holds the command line of a program, whose braces and equals signs would
    be Hydra's syntax. A value that is quoted as a whole stays.

    >>> quote_command("rollout.agent.command=python a.py --n=1 {task}")
    "rollout.agent.command='python a.py --n=1 {task}'"
    """
    path, _, value = text.partition("=")
    if not path.endswith(COMMAND_KEY) or value in ("", "null"):
        return text
    try:
        is_quoted = value[0] in "'\"" and len(shlex.split(value)) == 1
    except ValueError:  # a quotation mark is missing, which the reader of the key reports
        is_quoted = False
    if is_quoted:
        return text
    escaped = re.sub(r"(\\*)'", r"\1\1\'", value)
    return f"{path}='{escaped}'"


def force_override(text: str, groups: Container[str], of_user: Container[str] = ()) -> str:
    """The override with `++`, which adds keys too: what does not exist is refused by us, with the nearest
    names. The choice of one of the `groups` and what deletes a key stay as they are; so does `+group=name`
    for the groups `of_user`, which no defaults list has."""
    if text.startswith("~"):
        return text
    if "=" not in text:
        raise ConfigError(f"Expected key=value, got {text!r}.")
    key = text.partition("=")[0]
    is_group = "@" in key or "/" in key or key in groups
    if text.startswith("+") and not text.startswith("++") and key[1:].partition("/")[0] in of_user:
        return text
    if not text.startswith("+") and (is_group or key.startswith("hydra.")):
        return text
    return "++" + text.lstrip("+")


def plain_values(overrides: Sequence[str]) -> dict[str, object] | None:
    """Overrides that are plain words, numbers and flat lists of them, read as Hydra reads them; None if any
    needs its grammar.

    Hydra takes a third of a second to import and to start. Most command lines hold nothing but `a.b=3`, and
    our own primary files and groups hold no values, so for those the answer is the same without it (a test
    compares the two).
    """
    found: dict[str, object] = {}
    for text in overrides:
        path, _, value = text.removeprefix("++").partition("=")
        if not text.startswith("++") or path.startswith("hydra."):
            return None
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", path):
            return None
        try:
            if _LIST.fullmatch(value):
                found[path] = [_plain(item) for item in value[1:-1].split(",")]
            else:
                found[path] = _plain(value)
        except ValueError:
            return None
    return flatten(nest(found))


def _plain(text: str) -> object:
    """A word or a number; ValueError for anything else."""
    if text.lower() in _SPECIAL:
        return _SPECIAL[text.lower()]
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if _WORD.fullmatch(text) and text.lower() not in ("inf", "nan"):
        return text
    raise ValueError(text)
