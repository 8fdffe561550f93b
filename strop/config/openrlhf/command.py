"""Parses an OpenRLHF command: launcher, trainer, and flags of any generation.

The rules of `rules.py` and `run_rules.py` read the parsed command through a `ConversionDraft`, and write the
overrides to it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from strop.config.openrlhf.table import Row, names_of, read_words, rows_of
from strop.registry import did_you_mean

TRAINERS = {
    "train_ppo": "ppo",
    "train_ppo_ray": "ppo",
    "train_sft": "sft",
    "train_rm": "rm",
    "train_dpo": "dpo",
    "serve_rm": "serve-rm",
}
REMOVED = {
    "train_kto": "KTO; see `strop dpo loss.type=kto`",
    "train_prm": "process reward models",
    "train_kd": "distillation",
    "batch_inference": "batch inference (see `strop generate`)",
    "interactive_chat": "interactive chat",
}
_ENTRY = re.compile(r"(?:.*[./])?(train_\w+|serve_rm|batch_inference|interactive_chat)(?:\.py)?")
_VARIABLE = re.compile(r"\$[{A-Za-z_]")
_GPUS = ("num_gpus", "nproc_per_node")
_NODES = ("num_nodes", "nnodes")


@dataclass(frozen=True)
class Given:
    """A flag as the user typed it."""

    value: object
    spelled: str

    @property
    def shown(self) -> str:
        """The value as text; empty for a switch."""
        if self.value is True:
            return ""
        return " ".join(map(str, self.value)) if isinstance(self.value, list) else str(self.value)


@dataclass
class Command:
    """A parsed command."""

    verb: str
    trainer: str
    generation: int  # 1: single-node train_ppo of 2024; 2: flat names; 3: dotted names
    given: dict[str, Given]
    launcher: list[str]
    gpus: int | None = None  # from the launcher; Ray commands have flags for it
    nodes: int | None = None
    notes: list[str] = field(default_factory=list)


def read_command(argv: list[str]) -> Command:
    """Parse a command, given as words or as one string."""
    words = _words(argv)
    launcher, trainer, rest = _split_entry(words)
    verb = TRAINERS[trainer]
    notes: list[str] = []
    given = _read_flags(rest, verb, notes)
    generation = _generation(trainer, verb, given, notes)
    command = Command(verb, trainer, generation, given, launcher, notes=notes)
    if "ray" not in launcher:
        command.gpus = _launched(launcher, _GPUS)
        command.nodes = _launched(launcher, _NODES)
        if command.gpus is None:
            command.gpus = _included(launcher)
    return command


def split_command(argv: list[str]) -> tuple[str, list[str]]:
    """The name of the program, and its arguments."""
    _, program, rest = _split_entry(_words(argv))
    return program, rest


def _words(argv: list[str]) -> list[str]:
    """Argument words. A whole command in one string (a script, with continuations and comments) is split as a
    shell would."""
    if len(argv) == 1 and re.search(r"\s", argv[0]):
        script = argv[0].replace("\\\r\n", "\\\n")
        lines = [line for line in script.split("\n") if not line.lstrip().startswith("#")]
        try:
            argv = shlex.split("\n".join(lines).replace("\\\n", " "))
        except ValueError as error:
            raise ValueError(f"The command cannot be split into words: {error}. Check its quotes.") from None
    return [word for word in argv if word.strip() not in ("", "\\") or word == ""]


def _split_entry(words: list[str]) -> tuple[list[str], str, list[str]]:
    """The words before the trainer's name, the name, and its arguments."""
    start = words.index("--") + 1 if "--" in words else 0
    for at in range(start, len(words)):
        found = _ENTRY.fullmatch(words[at].strip())
        if found is None:
            continue
        name = found[1]
        if name in REMOVED:
            raise ValueError(
                f"{name} ({REMOVED[name]}) was removed from OpenRLHF and has no converter. Known: {_known()}."
            )
        if name in TRAINERS:
            return words[:at], name, words[at + 1 :]
        raise ValueError(
            f"Unknown OpenRLHF trainer {name!r}.{did_you_mean(name, TRAINERS)} Known: {_known()}."
        )
    raise ValueError(
        f"No OpenRLHF trainer in the command. Start it with one of {_known()}, for instance `train_ppo_ray "
        "--pretrain ...` or `python3 -m openrlhf.cli.train_sft ...`."
    )


def _known() -> str:
    return ", ".join(TRAINERS)


def _read_flags(words: list[str], verb: str, notes: list[str]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    at = 0
    while at < len(words):
        if not words[at].startswith("--"):
            raise ValueError(
                f"{words[at][:60]!r} belongs to no flag. A switch takes no value; a value with spaces needs "
                "quotes."
            )
        typed, equals, attached = words[at][2:].partition("=")
        name = _completed(typed, verb)
        if name != typed:
            notes.append(f"--{typed} is read as --{name}, the one flag that begins so.")
        rows = names_of(verb).get(name)
        if rows is None:
            raise ValueError(
                f"Unknown flag --{name} of OpenRLHF's {verb} trainer.{did_you_mean(name, names_of(verb))}"
            )
        end = at + 1
        while end < len(words) and not words[end].startswith("--"):
            end += 1
        values = words[at + 1 : end]
        if equals:
            values.insert(0, attached)
        _check_count(rows[0], name, values)
        if rows[0].type != "secret" and any(_VARIABLE.search(value) for value in values):
            raise ValueError(
                f"--{name} is {' '.join(values)[:80]!r}: write the value instead of the shell variable."
            )
        if rows[0].id in given:
            notes.append(f"--{name} is given more than once; the last one counts.")
        try:
            given |= {row.id: Given(read_words(row, values), f"--{name}") for row in rows}
        except ValueError as error:
            raise ValueError(f"--{name} {error}") from None
        at = end
    return given


def _completed(name: str, verb: str) -> str:
    """The name of the one flag that begins with `name`, which argparse takes for it; otherwise `name`."""
    names = names_of(verb)
    if name in names or not name:
        return name
    found = [full for full in names if full.startswith(name)]
    is_one_flag = len({names[full] for full in found}) == 1
    return found[0] if is_one_flag else name


def _check_count(row: Row, name: str, values: list[str]) -> None:
    if row.type == "band" and len(values) == 1:
        return
    wanted = {"switch": 0, "pair": 2, "band": 2, "words": None}.get(row.type, 1)
    if wanted is None or len(values) == wanted:
        return
    if wanted == 0:
        raise ValueError(
            f"--{name} is a switch and takes no value, but {values[0][:60]!r} follows it. Leave that out."
        )
    if len(values) < wanted:
        needed = "two numbers" if wanted == 2 else "a value"
        raise ValueError(f"--{name} needs {needed}, but {len(values) or 'none'} follows it.")
    plural = "s" if wanted > 1 else ""
    raise ValueError(
        f"--{name} takes {wanted} value{plural}, but {' '.join(values)[:60]!r} follows it. Add quotes?"
    )


def _generation(trainer: str, verb: str, given: dict[str, Given], notes: list[str]) -> int:
    """The generation of OpenRLHF that the spelling of the flags points to."""
    names = names_of(verb)
    dotted = set()
    flat = set()
    for flag in given.values():
        name = flag.spelled.removeprefix("--")
        if "." in name:
            dotted.add(flag.spelled)
        if all(row.flag != name for row in names[name]):
            flat.add(flag.spelled)
    if dotted:
        if flat:
            notes.append(
                f"Old and new flag names are mixed ({min(flat)}, {min(dotted)}); OpenRLHF would refuse, both "
                "are read here."
            )
        return 3
    later = any(row.only_later for flag in given.values() for row in names[flag.spelled[2:]])
    if trainer == "train_ppo" and not later:
        return 1
    if flat or trainer == "train_ppo":
        return 2
    return 3


def _launched(launcher: list[str], names: tuple[str, ...]) -> int | None:
    """The positive number that follows one of the launcher's options, as `--name 8` or `--name=8`."""
    for at, word in enumerate(launcher):
        name, equals, value = word.partition("=")
        if not name.startswith("-") or name.lstrip("-").replace("-", "_") not in names:
            continue
        if not equals:
            value = "".join(launcher[at + 1 : at + 2])
        if value.isascii() and value.isdecimal() and int(value[:9]) > 0:
            return int(value)
        return None
    return None


def _included(launcher: list[str]) -> int | None:
    """The number of GPUs in DeepSpeed's `--include localhost:0,1,2,3`."""
    for at, word in enumerate(launcher[:-1]):
        if word in ("--include", "-i") and launcher[at + 1].count(":") == 1:
            return len([gpu for gpu in launcher[at + 1].split(":")[1].split(",") if gpu])
    return None


# --- The draft on which rules write a conversion ------------------------------------------------------------

DEFAULT = "OpenRLHF's default"


@dataclass(frozen=True)
class Override:
    """One key of the converted run, the flag that it comes from, and the reason for its value."""

    key: str
    value: Any
    flag: str
    reason: str
    implied: bool = False  # the flag was not typed: OpenRLHF's default is written out because ours differs


@dataclass
class ConversionDraft:
    """A parsed command, and the overrides that rules have found so far."""

    command: Command
    overrides: dict[str, Override] = field(default_factory=dict)
    unmapped: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> dict[str, Row]:
        return rows_of(self.command.verb)

    @property
    def generation(self) -> int:
        return self.command.generation

    @property
    def has_critic(self) -> bool:
        return self.command.verb == "ppo" and self.value("algo.advantage.estimator") == "gae"

    def given(self, *flags: str) -> bool:
        """Whether the user typed any of these flags."""
        return any(flag in self.command.given for flag in flags)

    def value(self, flag: str) -> Any:
        """The value that OpenRLHF would use: the typed one, or the default of the command's generation."""
        if flag in self.command.given:
            return self.command.given[flag].value
        return self.rows[flag].default(self.generation)

    def name(self, flag: str) -> str:
        """The flag in the user's spelling, or in that of the command's generation."""
        if flag in self.command.given:
            return self.command.given[flag].spelled
        row = self.rows[flag]
        if not row.older or (self.generation == 3 and row.flag):
            return f"--{row.flag}"
        return f"--{row.older[0]}"

    def put(self, key: str, value: Any, *flags: str, why: str | None = None) -> None:
        """Set a key because of these flags; the first flag's note is the reason unless `why` is given."""
        implied = not self.given(*flags)
        reason = why
        if reason is None:
            reason = self.rows[flags[0]].note
        if implied and reason:
            reason = f"{DEFAULT}; {reason}"
        elif implied:
            reason = DEFAULT
        typed = [flag for flag in flags if self.given(flag)] or list(flags[:1])
        names = " ".join(dict.fromkeys(map(self.name, typed)))
        self.overrides[key] = Override(key, value, names, reason, implied)

    def drop(self, flag: str, reason: str | None = None) -> None:
        """Report a typed flag that has no equivalent."""
        if self.given(flag):
            typed = self.command.given[flag]
            shown = typed.shown
            if self.rows[flag].type == "secret":
                shown = "(not shown)"
            self.unmapped.append((typed.spelled, shown, reason or self.rows[flag].note))
