"""The way back: a resolved configuration as flags of OpenRLHF's newest generation, as far as it has words for it.

A flag whose value is OpenRLHF's default is left out. A key that OpenRLHF cannot express is reported, unless it has our default
(`defaults`), which nobody asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.config.openrlhf_render import block, shell_word
from strop.config.openrlhf_reverse_rules import REVERSE_RULES, Sheet
from strop.config.openrlhf_table import VERBS, Row, about_critic, rows_of
from strop.config.openrlhf_transforms import TRANSFORMS

__all__ = ["Reverse", "to_openrlhf"]


@dataclass
class Reverse:
    """What a configuration is called in OpenRLHF."""

    verb: str
    launcher: list[str]
    flags: dict[str, Any]  # dotted name without dashes -> value; True is a switch
    unexpressed: list[tuple[str, Any, str]] = field(default_factory=list)  # key, value, reason
    notes: list[str] = field(default_factory=list)

    def arguments(self) -> list[str]:
        """The command as words, launcher included."""
        return [*self.launcher, *(word for flag, value in self.flags.items() for word in _words(flag, value))]

    def render(self) -> str:
        """The command, one flag per line, then what it leaves out."""
        lines = [" ".join(map(shell_word, self.launcher))]
        lines += ["   " + " ".join(map(shell_word, _words(flag, value))) for flag, value in self.flags.items()]
        text = [" \\\n".join(lines)]
        text += block("Settings OpenRLHF has no flag for", [f"# {key}={value}: {why}" for key, value, why in self.unexpressed])
        text += block("Good to know", [f"# - {note}" for note in self.notes])
        return "\n".join(text) + "\n"


def to_openrlhf(config: Mapping[str, Any], verb: str = "ppo", defaults: Mapping[str, Any] | None = None) -> Reverse:
    """Translate a resolved, nested configuration (and, to keep the report short, the defaults it started from)."""
    if verb not in VERBS:
        raise ValueError(f"OpenRLHF has no trainer for {verb!r}. Known: {', '.join(VERBS)}.")
    sheet = Sheet(verb, flatten(config))
    for row in rows_of(verb).values():
        if row.flag and row.targets and not row.rule:
            _single(sheet, row)
    for name in dict.fromkeys(row.rule for row in rows_of(verb).values() if row.rule):
        REVERSE_RULES[name](sheet)
    usual = flatten(defaults or {})
    left = {key: value for key, value in sheet.keys.items() if key not in sheet.used and not _unset(value)}
    for key, value in left.items():
        if sheet.matters(key) and (key not in usual or usual[key] != value):
            sheet.cannot(key, "no such flag")
    return Reverse(verb, _launcher(sheet), sheet.flags, sheet.unexpressed, sheet.notes)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; lists are values."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _single(sheet: Sheet, row: Row) -> None:
    """A flag that decides alone; where it stands for several keys they have to agree."""
    present = [key for key in row.targets if key in sheet.keys and (sheet.has_critic or not about_critic(key))]
    sheet.used.update(row.targets)
    values = [sheet.keys[key] for key in present]
    if not values or _unset(values[0]):
        return
    try:
        sheet.say(row.id, TRANSFORMS[row.transform].here_to_there(values[0]))
    except (ValueError, TypeError) as error:
        sheet.cannot(present[0], str(error))
    for key, value in zip(present[1:], values[1:]):
        if value != values[0] and not _unset(value):
            sheet.cannot(key, f"--{row.id} says the same for {present[0]}")


def _launcher(sheet: Sheet) -> list[str]:
    if sheet.verb == "ppo":
        return ["python3", "-m", "openrlhf.cli.train_ppo_ray"]
    gpus, nodes = sheet.get("trainer.n_gpus_per_node"), sheet.get("trainer.nnodes")
    counts = [*(["--num_nodes", str(nodes)] if nodes else []), *(["--num_gpus", str(gpus)] if gpus else [])]
    return ["deepspeed", *counts, "--module", f"openrlhf.cli.train_{sheet.verb}"]


def _words(flag: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{flag}"]
    return [f"--{flag}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]


def _unset(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, list | dict) and not value)
