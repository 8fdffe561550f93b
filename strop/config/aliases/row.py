"""One row of the tables of old names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Translation = Callable[[str, object], dict[str, object] | None]
"""(what `*` stands for, value) -> the new names with their values: {} for a value that says nothing, None for
a key that is not meant."""


@dataclass(frozen=True)
class Alias:
    """A renamed key: (pattern, new names, why).

    `*` stands for any beginning or any end of a path. A new name may use `{prefix}` for that part. A function
    instead of names turns the value into a mapping of new names to values.
    """

    old: str
    new: tuple[str, ...] | Translation
    why: str
    verbs: tuple[str, ...] = ()  # root names it is limited to

    def match(self, path: str) -> str | None:
        """The part of `path` that `*` stands for ("" without one); None when the pattern does not match."""
        if self.old.endswith(".*"):
            start = self.old[:-1]
            return path[len(start) :] if path.startswith(start) else None
        if self.old.startswith("*."):
            tail = self.old[1:]
            return path[: -len(tail)] if path.endswith(tail) and len(path) > len(tail) else None
        return "" if path == self.old else None


def under(new: str) -> Translation:
    """A translation that keeps the value and puts what `*` stands for into `new`."""
    return lambda prefix, value: {new.format(prefix=prefix): value}


PPO = ("ppo_trainer", "ppo_megatron_trainer")
SUPERVISED = ("sft_trainer", "rm_trainer", "dpo_trainer")
