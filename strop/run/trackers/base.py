"""Trackers: where metrics go. A tracker that fails during the run is dropped; the run continues.

    run = TrackedRun(directory, project="gsm8k", experiment="grpo", config=resolved)
    trackers = start(["console", "file"], run)
    trackers.log({"critic/score/mean": 0.7}, step=1)
    trackers.close()

The names are those of TRACKERS in the catalogue; an entry is called with the `TrackedRun` and returns a
Tracker. The id under which each tracker knows a run is kept in trackers.json, so that a resumed run continues
in the same one.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from strop.catalog import TRACKERS
from strop.config.schema.trainer import TrainerConfig
from strop.run.atomic_files import replace_text
from strop.stopping import StopRequested

log = logging.getLogger(__name__)

Metrics = Mapping[str, float | str]
Rows = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that a tracker gets when it starts."""

    directory: Path
    """Folder of the run."""
    project: str = TrainerConfig.project_name
    experiment: str = TrainerConfig.experiment_name
    config: Mapping[str, object] = field(default_factory=dict)
    """The resolved configuration, as plain values."""
    resumed_from: int | None = None
    """The step that the run resumes from: later records are void. None: a new run."""
    total_steps: int | None = None
    """The number of steps, where it is known."""
    console: str = TrainerConfig.console
    """What the console shows of a step: short or full."""


class Tracker(Protocol):
    """A destination of metrics and samples."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def log_generations(self, rows: Rows, step: int) -> None:
        """Log samples; a row has at least input, output and score."""
        ...

    def close(self) -> None:
        """Flush; after this everything that was logged can be read."""
        ...


@runtime_checkable
class MarksFailure(Protocol):
    """A tracker whose service shows how a run ended."""

    def mark_failed(self, reason: str) -> None:
        """The run failed: `close`, which follows, must not report it as finished."""
        ...


class Trackers:
    """Several trackers as one. One that raises is logged once and dropped."""

    def __init__(self, trackers: Mapping[str, Tracker]):
        self.active = dict(trackers)
        self._refused: set[str] = set()

    def log(self, metrics: Mapping[str, object], step: int) -> None:
        plain = {key: _plain(value) for key, value in metrics.items()}
        recorded = {key: value for key, value in plain.items() if value is not None}
        for key in plain.keys() - recorded.keys() - self._refused:
            self._refused.add(key)
            kind = type(metrics[key]).__name__
            log.warning(
                "The metric %r is a %s and is not recorded: trackers take numbers and texts.", key, kind
            )
        self._each(lambda tracker: tracker.log(recorded, step))

    def log_generations(self, rows: Rows, step: int) -> None:
        valid = [{key: _valid_text(value) for key, value in row.items()} for row in rows]
        self._each(lambda tracker: tracker.log_generations(valid, step))

    def close(self, error: BaseException | None = None) -> None:
        """Close all; `error` is what ended the run. A run that a signal ended in order did not fail."""
        failed = error is not None and not isinstance(error, StopRequested)

        def end(tracker: Tracker) -> None:
            try:
                if failed and isinstance(tracker, MarksFailure):
                    tracker.mark_failed(f"{type(error).__name__}: {error}")
            finally:
                tracker.close()

        self._each(end)
        self.active = {}

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.active.items()):
            try:
                action(tracker)
            except Exception as error:  # noqa: BLE001 - a tracker may fail, training may not
                del self.active[name]
                log.warning(
                    "The tracker %r failed and gets nothing more: %s: %s. The run continues.",
                    name,
                    type(error).__name__,
                    error,
                )


def start(names: str | Sequence[str], run: TrackedRun, more: Mapping[str, Tracker] | None = None) -> Trackers:
    """Start trackers by name. One that cannot start stops the run here, before any work is done. `more` are
    trackers of the caller."""
    wanted = [names] if isinstance(names, str) else list(names)
    # Two names of one tracker would write everything twice.
    kinds = {}
    for entry in map(TRACKERS.entry, wanted):
        kinds[entry.load()] = entry.name
    started: dict[str, Tracker] = {}
    for kind, name in kinds.items():
        try:
            started[name] = kind(run)
        except Exception as error:
            Trackers(started).close(error)
            raise ValueError(
                f"The tracker {name!r} of trainer.logger could not start: {type(error).__name__}: {error} "
                "Correct this, or take it out of trainer.logger."
            ) from error
    return Trackers({**started, **(more or {})})


def _plain(value: object) -> float | str | None:
    """A number or a text, None for anything else; tensors and arrays without dimensions become numbers."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return _valid_text(value) if isinstance(value, str | int | float) else None


def _valid_text(value: Any) -> Any:
    """A value whose texts have UTF-8. JSON that a model wrote can hold half of a surrogate pair, which no
    library writes."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_valid_text(key): _valid_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid_text(item) for item in value]
    return value


FILE = "trackers.json"
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"


def saved_id(run: TrackedRun, tracker: str) -> str | None:
    """The id of a resumed run; None for a new run, and where none was saved."""
    if run.resumed_from is None:
        return None
    return _saved_ids(run).get(tracker)


def save_id(run: TrackedRun, tracker: str, identity: str) -> None:
    """Save the id under which a tracker knows the run."""
    run.directory.mkdir(parents=True, exist_ok=True)
    replace_text(run.directory / FILE, json.dumps({**_saved_ids(run), tracker: identity}, indent=1))


def get_or_create_id(
    run: TrackedRun, tracker: str, make: Callable[[], str] | None = None, length: int = 12
) -> str:
    """The run's id at a tracker that accepts chosen ids: the saved one, or a new one."""
    identity = saved_id(run, tracker)
    if not identity:
        identity = new_id(length) if make is None else make()
    save_id(run, tracker, identity)
    return identity


def new_id(length: int) -> str:
    """A random id of small letters and digits."""
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


def columns_of(rows: Rows) -> list[str]:
    """The keys of all rows, in the order of their first occurrence."""
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    return list(columns)


def _saved_ids(run: TrackedRun) -> dict[str, str]:
    try:
        return dict(json.loads((run.directory / FILE).read_text()))
    except (OSError, ValueError):
        return {}
