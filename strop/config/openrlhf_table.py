"""OpenRLHF's flags as data: reads `openrlhf_flags.tsv`, whose head explains the columns."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPERVISED = ("sft", "rm", "dpo")
VERBS = ("ppo", *SUPERVISED)


@dataclass(frozen=True)
class Row:
    """One flag of one or more trainers."""

    verbs: tuple[str, ...]
    flag: str  # dotted name, empty when the flag is gone
    older: tuple[str, ...]  # flat names
    type: str
    default_text: str
    g1_text: str
    targets: tuple[str, ...]
    transform: str
    when: str
    note: str

    @property
    def id(self) -> str:
        """How rules call this row: the newest name there is."""
        return self.flag or self.older[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.flag, *self.older) if self.flag else self.older))

    @property
    def rule(self) -> str:
        """The rule that decides about this flag together with others, or nothing."""
        return self.transform.removeprefix("rule:") if self.transform.startswith("rule:") else ""

    @property
    def only_later(self) -> bool:
        """Whether the flag proves that a flat command is not the single-node trainer of 2024."""
        return self.g1_text == "absent"

    def default(self, generation: int) -> Any:
        text = self.g1_text if generation == 1 and self.g1_text not in ("", "absent") else self.default_text
        return None if text == "none" else read_words(self, [text] if self.type in ("str", "secret") else text.split())

    def written(self, generation: int) -> bool:
        """Whether the default must be spelled out because ours is another."""
        return self.when == "always" or (generation == 1 and self.g1_text not in ("", "absent", "none"))


def about_critic(key: str) -> bool:
    """Whether a key has a meaning only where a critic is trained."""
    return key.startswith("critic.") or key == "trainer.max_critic_ckpt_to_keep"


def read_words(row: Row, words: list[str]) -> Any:
    """The words after a flag as a value of the row's type; ValueError says, after the name of the flag, what was expected."""
    kind = row.type
    if kind == "switch":
        return not words or words == ["on"]
    if kind == "words":
        return list(words)
    if kind in ("pair", "band"):
        return [_number(row, word) for word in words]
    word = words[0]
    if kind in ("int", "int+"):
        number = _number(row, word, whole=True)
        if kind == "int+" and number < 1:
            raise ValueError(f"is {word}, but must be at least 1.")
        return number
    if kind == "float":
        return float(_number(row, word))
    if "|" in kind and word not in kind.split("|"):
        raise ValueError(f"is {word!r}, but must be one of {', '.join(kind.split('|'))}.")
    return word


def _number(row: Row, word: str, whole: bool = False) -> int | float:
    try:
        value = int(word) if whole or word.lstrip("+-").isdecimal() else float(word)
    except ValueError:
        expected = "a whole number" if whole else "a number"
        raise ValueError(f"expects {expected}, but got {word[:60]!r}.") from None
    if not math.isfinite(value) and word != row.default_text:
        raise ValueError(f"is {word}, but must be finite.")
    return value


@functools.cache
def load_rows() -> tuple[Row, ...]:
    text = Path(__file__).with_name("openrlhf_flags.tsv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(_row(line) for line in lines[1:])


@functools.cache
def rows_of(verb: str) -> dict[str, Row]:
    """A trainer's flags by id."""
    return {row.id: row for row in load_rows() if verb in row.verbs}


@functools.cache
def names_of(verb: str) -> dict[str, tuple[Row, ...]]:
    """Every spelling of a trainer's flags; one old flag may stand for several new ones."""
    spelled: dict[str, tuple[Row, ...]] = {}
    for row in rows_of(verb).values():
        for name in row.names:
            spelled[name] = (*spelled.get(name, ()), row)
    return spelled


def flags_for(verb: str, key: str) -> tuple[str, ...]:
    """What OpenRLHF calls a key, newest names; several when they decide it together."""
    return tuple(row.flag for row in rows_of(verb).values() if row.flag and key in row.targets)


def _row(line: str) -> Row:
    verbs, flag, older, kind, default, g1, targets, transform, when, note = line.split("\t")
    several = {"all": VERBS, "sup": SUPERVISED}
    return Row(
        verbs=several.get(verbs) or tuple(verbs.split(",")),
        flag="" if flag == "-" else flag,
        older=() if older == "-" else tuple(older.split(",")),
        type=kind,
        default_text=default.replace("\\n", "\n"),
        g1_text="" if g1 == "-" else g1,
        targets=() if targets == "-" else tuple(targets.split()),
        transform=transform,
        when=when,
        note=note,
    )
