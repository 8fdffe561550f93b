"""The sheet on which rules write a conversion: what was given, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strop.config.openrlhf_argv import Command
from strop.config.openrlhf_table import Row, rows_of

DEFAULT = "OpenRLHF's default"


@dataclass(frozen=True)
class Override:
    """One setting of the converted run, where it comes from and why its value may look different."""

    key: str
    value: Any
    flag: str
    reason: str
    implied: bool = False  # nobody typed the flag: OpenRLHF's default is written out because ours differs


@dataclass
class Draft:
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
        return any(flag in self.command.given for flag in flags)

    def value(self, flag: str) -> Any:
        """What the run uses: the typed value, or the default of the command's generation."""
        if flag in self.command.given:
            return self.command.given[flag].value
        return self.rows[flag].default(self.generation)

    def name(self, flag: str) -> str:
        """The flag as this user spells it."""
        if flag in self.command.given:
            return self.command.given[flag].spelled
        row = self.rows[flag]
        return "--" + (row.flag if self.generation == 3 and row.flag else (row.older or (row.flag,))[0])

    def put(self, key: str, value: Any, *flags: str, why: str | None = None) -> None:
        """Set a key because of these flags; the first one's note is the reason unless `why` is given."""
        implied = not self.given(*flags)
        reason = self.rows[flags[0]].note if why is None else why
        if implied:
            reason = f"{DEFAULT}; {reason}" if reason else DEFAULT
        typed = [flag for flag in flags if self.given(flag)] or list(flags[:1])
        self.overrides[key] = Override(key, value, " ".join(dict.fromkeys(map(self.name, typed))), reason, implied)

    def drop(self, flag: str, reason: str | None = None) -> None:
        """A typed flag without equivalent."""
        if self.given(flag):
            typed = self.command.given[flag]
            shown = "(not shown)" if self.rows[flag].type == "secret" else typed.shown
            self.unmapped.append((typed.spelled, shown, reason or self.rows[flag].note))
