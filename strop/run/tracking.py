"""Where metrics go: a fan-out over trackers, of which any may break later without stopping the run.

    trackers = start(["console", "file"], Run(directory, project="gsm8k", experiment="grpo", config=resolved))
    trackers.log({"critic/score/mean": 0.7}, step=1)
    trackers.close()

The names are those of TRACKERS in the catalogue; an entry is called with the `Run` and returns a Tracker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from strop.catalog import TRACKERS

log = logging.getLogger(__name__)

Metrics = Mapping[str, float | str]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """What a tracker is told when it starts."""

    directory: Path
    """Folder of the run."""
    project: str = "strop"
    experiment: str = "default"
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, as plain values."""
    resumed_from: int | None = None
    """The step the run goes on from: what was recorded after it never happened. None: a new run."""
    total_steps: int | None = None
    """How long it will be, when that is known."""


class Tracker(Protocol):
    def log(self, metrics: Metrics, step: int) -> None: ...

    def log_generations(self, rows: Rows, step: int) -> None:
        """Samples to read; a row has at least input, output and score."""
        ...

    def close(self) -> None:
        """Flush; after this everything that was logged can be read."""
        ...


class Trackers:
    """Several trackers as one. One that raises is reported once and left out from then on."""

    def __init__(self, trackers: Mapping[str, Tracker]):
        self.active = dict(trackers)
        self._refused: set[str] = set()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        plain = {key: _plain(value) for key, value in metrics.items()}
        known = {key: value for key, value in plain.items() if value is not None}
        for key in plain.keys() - known.keys() - self._refused:
            self._refused.add(key)
            kind = type(metrics[key]).__name__
            log.warning("The metric %r is a %s and is not recorded: trackers take numbers and texts.", key, kind)
        self._each(lambda tracker: tracker.log(known, step))

    def log_generations(self, rows: Rows, step: int) -> None:
        self._each(lambda tracker: tracker.log_generations(rows, step))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self.active = {}

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.active.items()):
            try:
                action(tracker)
            except Exception as error:  # noqa: BLE001 - a tracker may fail, training may not
                del self.active[name]
                log.warning(
                    "The tracker %r failed and gets nothing more: %s: %s. The run goes on.", name, type(error).__name__, error
                )


def start(names: str | Sequence[str], run: Run) -> Trackers:
    """Start trackers by name. One that cannot start stops the run here, before anything was spent."""
    wanted = [names] if isinstance(names, str) else list(names)
    # Two names of one tracker would write everything twice.
    kinds = {entry.load(): entry.name for entry in map(TRACKERS.entry, wanted)}
    started: dict[str, Tracker] = {}
    for kind, name in kinds.items():
        try:
            started[name] = kind(run)
        except Exception as error:
            Trackers(started).close()
            raise ValueError(
                f"The tracker {name!r} of trainer.logger could not start: {type(error).__name__}: {error} "
                "Correct this, or take it out of trainer.logger."
            ) from error
    return Trackers(started)


def _plain(value: Any) -> float | str | None:
    """A number or a text, None for anything else; tensors and arrays without dimensions become numbers."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    return value if isinstance(value, str | int | float) else None
