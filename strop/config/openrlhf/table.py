"""The table of OpenRLHF's flags, and the conversion of single values.

`openrlhf_flags.tsv` has one row per flag; its head explains the columns. `TRANSFORMS` converts the value of
one flag to the value of our key, and back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

SUPERVISED = ("sft", "rm", "dpo")
VERBS = ("ppo", *SUPERVISED)
SAVED = ["model", "optimizer", "extra"]
NO_CLIPPING = 1e9
"""A norm that no gradient reaches, where 0 switches clipping off."""

ConvertValue: TypeAlias = Callable[[Any], object]


@dataclass(frozen=True)
class Row:
    """One flag of one or more trainers."""

    verbs: tuple[str, ...]
    flag: str  # dotted name, empty when the flag is gone
    older: tuple[str, ...]  # flat names of earlier generations
    type: str
    default_text: str
    g1_text: str
    targets: tuple[str, ...]
    transform: str
    when: str
    note: str

    @property
    def id(self) -> str:
        """The name that rules use for this row: the newest name of the flag."""
        return self.flag or self.older[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings of the flag, the newest first."""
        spellings = [self.flag, *self.older]
        return tuple(name for name in dict.fromkeys(spellings) if name)

    @property
    def rule(self) -> str:
        """Name of the rule that handles this flag together with other flags, or an empty string."""
        if not self.transform.startswith("rule:"):
            return ""
        return self.transform.removeprefix("rule:")

    @property
    def only_later(self) -> bool:
        """Whether the flag proves that a flat command is not the single-node trainer of 2024."""
        return self.g1_text == "absent"

    def default(self, generation: int) -> object:
        """The flag's default in a generation of OpenRLHF."""
        text = self.default_text
        if generation == 1 and self.g1_text not in ("", "absent"):
            text = self.g1_text
        if text == "none":
            return None
        if self.type in ("str", "secret"):
            return read_words(self, [text])
        return read_words(self, text.split())

    def written(self, generation: int) -> bool:
        """Whether the default must be written out because our default differs."""
        return self.when == "always" or (generation == 1 and self.g1_text not in ("", "absent", "none"))


def about_critic(key: str) -> bool:
    """Whether a key only has an effect when a critic is trained."""
    return key.startswith("critic.") or key == "trainer.max_critic_ckpt_to_keep"


def read_words(row: Row, words: list[str]) -> object:
    """Parse the words after a flag as a value of the row's type.

    The text of a ValueError says what was expected; the caller puts the name of the flag in front.
    """
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
    value: int | float
    try:
        if whole or word.lstrip("+-").isdecimal():
            value = int(word)
        else:
            value = float(word)
    except ValueError:
        expected = "a whole number" if whole else "a number"
        raise ValueError(f"expects {expected}, but got {word[:60]!r}.") from None
    if not math.isfinite(value) and word != row.default_text:
        raise ValueError(f"is {word}, but must be finite.")
    return value


@functools.cache
def load_rows() -> tuple[Row, ...]:
    """All rows of `openrlhf_flags.tsv`."""
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
    """OpenRLHF's newest flags that set a key; several when they set it together."""
    return tuple(row.flag for row in rows_of(verb).values() if row.flag and key in row.targets)


def _row(line: str) -> Row:
    verbs, flag, older, kind, default, g1, targets, transform, when, note = line.split("\t")
    several = {"all": VERBS, "sup": SUPERVISED}
    return Row(
        verbs=several.get(verbs) or tuple(verbs.split(",")),
        flag=_without_dash(flag),
        older=tuple(name for name in _without_dash(older).split(",") if name),
        type=kind,
        default_text=default.replace("\\n", "\n"),
        g1_text=_without_dash(g1),
        targets=tuple(_without_dash(targets).split()),
        transform=transform,
        when=when,
        note=note,
    )


def _without_dash(cell: str) -> str:
    """A cell of the table; `-` stands for an empty cell."""
    return "" if cell == "-" else cell


# --- Conversion of single values ----------------------------------------------------------------------------


class NoEquivalentError(ValueError):
    """The other framework has no equivalent of a value; the message gives the reason."""


@dataclass(frozen=True)
class Transform:
    """Two pure functions that convert the value of one flag in each direction."""

    from_openrlhf: ConvertValue
    to_openrlhf: ConvertValue


def _same(value: object) -> object:
    return value


def _named(table: Mapping[Any, object], what: str) -> Transform:
    """Translate names. When several of OpenRLHF's names map to one of ours, the first is used in reverse."""
    reverse: dict[Any, object] = {}
    for theirs, ours in table.items():
        reverse.setdefault(ours, theirs)
    return Transform(lambda value: _lookup(table, value, what), lambda value: _lookup(reverse, value, what))


def _lookup(table: Mapping[Any, object], value: object, what: str) -> object:
    if not isinstance(value, str | bool | int | float | None) or value not in table:
        known = ", ".join(map(str, table))
        raise NoEquivalentError(f"{what} {value!r} has no equivalent; convertible are {known}")
    return table[value]


def split_commas(text: str) -> str | list[str]:
    """The names in a comma-separated text: the name itself when there is one, else a list."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return single_or_list(parts)


def single_or_list(names: list[str]) -> str | list[str]:
    """The only name of the list, or the whole list."""
    return names[0] if len(names) == 1 else names


def as_list(value: str | Iterable[str]) -> list[str]:
    """One name or several names as a list."""
    return [value] if isinstance(value, str) else list(value)


def join_commas(value: object) -> str:
    """One value, or several values with commas between them."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)


def _floats(text: str) -> list[float]:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if not weights or not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(
            f"Mixture weights must be numbers of at least 0 with commas between them, but got {text[:60]!r}."
        )
    return weights


def _positive_count(count: int) -> int | None:
    """-1 means all samples, which needs no flag."""
    return count if count > 0 else None


def _first_actor_update(freezing_steps: int) -> int:
    """OpenRLHF's number of steps with a frozen actor as our step of the first update."""
    return 0 if freezing_steps < 0 else freezing_steps + 2


def _freezing_steps(first_update: int) -> int:
    return -1 if first_update < 2 else first_update - 2


def _switch_for(expected: str) -> ConvertValue:
    """A function that turns `expected` into a switch and refuses every other value."""

    def to_switch(value: object) -> bool:
        if value != expected:
            raise NoEquivalentError(f"the switch only says {expected!r}")
        return True

    return to_switch


def _choose(when_on: str, when_off: str | None) -> ConvertValue:
    """A function that turns a switch into one of two names."""

    def from_switch(on: bool) -> str | None:
        return when_on if on else when_off

    return from_switch


def _zero_stage(reshard_after_forward: bool) -> int:
    return 3 if reshard_after_forward else 2


def _shard_group(size: int) -> int:
    return size if size > 1 else -1


def _saved_contents(export: bool) -> list[str]:
    return [*SAVED, "hf_model"] if export else SAVED


def _reward_loss(name: str) -> str:
    return "logsigmoid" if name == "sigmoid" else "logexp"


def _epoch_frequency(steps: int) -> int | str:
    return "after_each_epoch" if steps < 0 else steps


def _frequency_in_steps(frequency: int | str) -> int | str:
    return -1 if frequency == "after_each_epoch" else frequency


def _best_metric(name: str) -> str | None:
    if not name:
        raise NoEquivalentError(
            "an empty name lets OpenRLHF pick its first pass1 metric; give the metric's name here"
        )
    return None if name == "none" else name


SCHEDULES = _named(
    {
        "cosine_with_min_lr": "cosine",
        "cosine": "cosine",
        "constant_with_warmup": "constant",
        "constant": "constant",
        "linear": "linear",
        "warmup_stable_decay": "wsd",
    },
    "the schedule",
)
ESTIMATORS = _named(
    {
        "gae": "gae",
        "reinforce": "reinforce_plus_plus",
        "reinforce_baseline": "reinforce_plus_plus_baseline",
        "rloo": "rloo",
        "group_norm": "grpo",
        "dr_grpo": "grpo",
    },
    "the estimator",
)
KL_ESTIMATORS = _named({"k1": "kl", "k2": "mse", "k3": "low_var_kl"}, "the KL estimator")
POLICY_LOSSES = _named({"ppo": "vanilla", "gspo": "gspo"}, "the policy loss")

TRANSFORMS: dict[str, Transform] = {
    "same": Transform(_same, _same),
    "files": Transform(split_commas, join_commas),
    "floats": Transform(_floats, join_commas),
    "samples": Transform(_same, _positive_count),
    "clip": Transform(lambda norm: norm or NO_CLIPPING, lambda norm: norm if norm < NO_CLIPPING else 0.0),
    "negate": Transform(lambda on: not on, lambda value: not value),
    "zero_stage": Transform(lambda stage: stage >= 3, _zero_stage),
    "dtype": _named({"bf16": "bfloat16", "fp16": "float16"}, "the precision"),
    "nf4": Transform(_choose("nf4", None), _switch_for("nf4")),
    "bf16": Transform(_choose("bfloat16", "float32"), _switch_for("bfloat16")),
    "flash_attn": Transform(_choose("flash_attention_2", "eager"), _switch_for("flash_attention_2")),
    "shard_group": Transform(_shard_group, lambda size: max(size, 1)),
    "freeze": Transform(_first_actor_update, _freezing_steps),
    "modules": Transform(single_or_list, as_list),
    "resume": _named({False: "disable", True: "auto"}, "the resume mode"),
    "best_metric": Transform(_best_metric, lambda name: name or "none"),
    "export": Transform(_saved_contents, lambda contents: "hf_model" in contents),
    "rm_loss": Transform(_reward_loss, lambda name: {"logsigmoid": "sigmoid"}.get(name, name)),
    "dpo_loss": _named({False: "dpo", True: "ipo"}, "the loss"),
    "epoch_freq": Transform(_epoch_frequency, _frequency_in_steps),
    "optimizer": _named({"adam": "AdamW"}, "the optimizer"),
}
