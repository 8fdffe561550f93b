"""A TRL run and the overrides that the rules have found so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.config.openrlhf.command import Override
from strop.config.trl.script import Expression, TrlRun
from strop.config.trl.table import COMBINED, Argument

ACTOR = "actor_rollout_ref.actor"


@dataclass
class Draft:
    """The settings found so far."""

    run: TrlRun
    overrides: dict[str, Override] = field(default_factory=dict)
    unmapped: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def value(self, name: str) -> object:
        """What TRL would use: the written value or the default; the default too if it is an expression."""
        written = self.run.config.get(name, COMBINED[name])
        return COMBINED[name] if isinstance(written, Expression) else written

    def number(self, name: str) -> float:
        """A number; raises ValueError for anything else."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.run.source}: {name} must be a number, got {value!r}.")
        return value

    def given(self, *names: str) -> bool:
        return any(name in self.run.config for name in names)

    def put(self, key: str, value: object, *names: str, why: str = "") -> None:
        """Set a key because of these arguments."""
        typed = [name for name in names if self.given(name)]
        if not typed:
            why = f"default; {why}" if why else "default"
        self.overrides[key] = Override(key, value, " ".join(typed or names[:1]), why, implied=not typed)

    def section(self, key: str) -> str:
        """A key of the model or optim section at the place where this trainer has it."""
        return Argument("", key).target(self.run.trainer)
