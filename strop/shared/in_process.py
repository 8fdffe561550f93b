"""Objects that a caller in the same process gives to a run, next to the configuration: functions instead of
the files that name them, and an observer. A run of the command line has none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from strop.run.trackers.base import Tracker


class RunObserver(Tracker, Protocol):
    """Follows a run from its own process. It is one of the trackers, and it may end the run."""

    wants_samples: bool
    """Whether `on_samples` is to be called."""
    replaces_console: bool
    """Whether it shows the progress, so that the tracker `console` is left out."""

    def begin(self, step: int, total_steps: int) -> None:
        """The run goes on after `step` (0: it is new)."""
        ...

    def on_samples(self, split: str, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """The samples of a step: `split` is train or validation."""
        ...

    @property
    def stop_requested(self) -> bool:
        """Whether the run is to end after this step, with a checkpoint."""
        ...


@dataclass(frozen=True)
class InProcess:
    """What the caller gives."""

    reward: Callable[..., object] | None = None
    """Used instead of loading custom_reward_function."""
    tools: tuple[Callable[..., object], ...] = ()
    """Used instead of reading rollout.multi_turn.tool_config_path."""
    observer: RunObserver | None = None


NOTHING_GIVEN = InProcess()
