"""Converts a resolved configuration to flags of OpenRLHF's newest generation, as far as it has such flags.

A flag whose value is OpenRLHF's default is left out. A key that OpenRLHF cannot express is reported, unless
it has our default (`defaults`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strop.config.openrlhf.convert import block, shell_word
from strop.config.openrlhf.reverse_rules import REVERSE_RULES, ReverseDraft
from strop.config.openrlhf.table import TRANSFORMS, VERBS, Row, about_critic, rows_of
from strop.config.rules import check

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.ppo import PpoConfig

__all__ = ["Reverse", "convert_to_openrlhf", "to_openrlhf"]


@dataclass
class Reverse:
    """A configuration as an OpenRLHF command."""

    verb: str
    launcher: list[str]
    flags: dict[str, object]  # dotted name without dashes -> value; True is a switch
    unexpressed: list[tuple[str, object, str]] = field(default_factory=list)  # key, value, reason
    notes: list[str] = field(default_factory=list)

    def arguments(self) -> list[str]:
        """The command as words, launcher included."""
        words = list(self.launcher)
        for flag, value in self.flags.items():
            words += _words(flag, value)
        return words

    def render(self) -> str:
        """The command, one flag per line, then what it leaves out."""
        lines = [" ".join(map(shell_word, self.launcher))]
        for flag, value in self.flags.items():
            lines.append("   " + " ".join(map(shell_word, _words(flag, value))))
        text = [" \\\n".join(lines)]
        text += block(
            "Settings OpenRLHF has no flag for",
            [f"# {key}={value}: {why}" for key, value, why in self.unexpressed],
        )
        text += block("Good to know", [f"# - {note}" for note in self.notes])
        return "\n".join(text) + "\n"


def convert_to_openrlhf(loaded: Loaded[PpoConfig], defaults: Mapping[str, object]) -> Reverse:
    """Convert a configuration, unless `strop check` refuses it: its flags would not be one run either."""
    refused: list[str] = []
    for finding in check(loaded):
        if finding.level == "error" and not finding.about_machine:
            refused.append(f"  {finding}")
    if refused:
        raise ValueError("\n".join(["This configuration cannot run, so it is not converted:", *refused]))
    return to_openrlhf(loaded.tree(), defaults=defaults)


def to_openrlhf(
    config: Mapping[str, object], verb: str = "ppo", defaults: Mapping[str, object] | None = None
) -> Reverse:
    """Convert a resolved, nested configuration. Keys that have the value of `defaults` are not reported."""
    if verb not in VERBS:
        raise ValueError(f"OpenRLHF has no trainer for {verb!r}. Known: {', '.join(VERBS)}.")
    draft = ReverseDraft(verb, flatten(config))
    for row in rows_of(verb).values():
        if row.flag and row.targets and not row.rule:
            _single(draft, row)
    if draft.keys.get("compat") == "openrlhf":
        draft.used.add("compat")
        if draft.keys.get("loss.type") == "ipo" and draft.keys.get("loss.length_normalized") is None:
            draft.keys["loss.length_normalized"] = False
    for name in dict.fromkeys(row.rule for row in rows_of(verb).values() if row.rule):
        REVERSE_RULES[name](draft)
    default_values = flatten(defaults or {})
    for key, value in draft.keys.items():
        if key in draft.used or _unset(value) or not draft.matters(key):
            continue
        if key not in default_values or default_values[key] != value:
            draft.report(key, "no such flag")
    return Reverse(verb, _launcher(draft), draft.flags, draft.unexpressed, draft.notes)


def flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested sections as dotted keys; lists are values."""
    flat: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _single(draft: ReverseDraft, row: Row) -> None:
    """Convert a flag that depends on no other flag. Several keys of one flag must have the same value."""
    present = [
        key for key in row.targets if key in draft.keys and (draft.has_critic or not about_critic(key))
    ]
    draft.used.update(row.targets)
    values = [draft.keys[key] for key in present]
    if not values or _unset(values[0]):
        return
    try:
        draft.set_flag(row.id, TRANSFORMS[row.transform].to_openrlhf(values[0]))
    except (ValueError, TypeError) as error:
        draft.report(present[0], str(error))
    for key, value in zip(present[1:], values[1:]):
        if value != values[0] and not _unset(value):
            draft.report(key, f"--{row.id} says the same for {present[0]}")


def _launcher(draft: ReverseDraft) -> list[str]:
    if draft.verb == "ppo":
        return ["python3", "-m", "openrlhf.cli.train_ppo_ray"]
    gpus = draft.get("trainer.n_gpus_per_node")
    nodes = draft.get("trainer.nnodes")
    words = ["deepspeed"]
    if nodes:
        words += ["--num_nodes", str(nodes)]
    if gpus:
        words += ["--num_gpus", str(gpus)]
    return [*words, "--module", f"openrlhf.cli.train_{draft.verb}"]


def _words(flag: str, value: object) -> list[str]:
    """A flag and its value as words of a command."""
    if value is True:
        return [f"--{flag}"]
    if isinstance(value, list | tuple):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", str(value)]


def _unset(value: object) -> bool:
    return value is None or value == "" or (isinstance(value, list | dict) and not value)
