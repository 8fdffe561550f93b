"""Whether a run is well: rules over its metrics, told once per episode, in words, with what to try.

    health = Health(directory)
    metrics |= health.examine(metrics, step)

An episode begins when a rule speaks and ends when it has been silent for CALM steps. It begins with a line in alerts.jsonl and
on the console; while it lasts `health/<name>` is 1.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.run.health_history import History
from strop.run.health_rules import RULES, Rule
from strop.run.trackers.jsonl import append, begin

log = logging.getLogger(__name__)

CALM = 10
ALERTS = "alerts.jsonl"


@dataclass(frozen=True)
class Alert:
    step: int
    time: float
    name: str
    severity: str
    message: str
    advice: str
    values: dict[str, float]


class Monitor:
    """Rules over a history, as episodes. Knows nothing of files."""

    def __init__(self, rules: Sequence[Rule] = RULES, clock: Callable[[], float] = time.time):
        self.rules, self.clock = rules, clock
        self.history = History()
        self.speaking: dict[str, int] = {}
        """Name of each open episode -> training step, counted from the start, in which its rule last spoke."""

    def see(self, metrics: Mapping[str, object], step: int) -> list[Alert]:
        """Take in a step; the alerts of the episodes that begin with it."""
        self.history.add(metrics, step)
        if "timing_s/step" not in metrics:  # a validation by itself
            return []
        begun = []
        for rule in self.rules:
            sight = rule.look(self.history)
            if sight is not None:
                if rule.name not in self.speaking:
                    begun.append(Alert(step, self.clock(), rule.name, rule.severity, sight.message, rule.advice, sight.values))
                self.speaking[rule.name] = self.history.steps
            elif self.history.steps - self.speaking.get(rule.name, self.history.steps) >= CALM:
                del self.speaking[rule.name]
        return begun


class Health:
    """A monitor of a run in a folder, which remembers over a resume."""

    def __init__(self, directory: Path, resumed_from: int | None = None):
        self.path = directory / ALERTS
        directory.mkdir(parents=True, exist_ok=True)
        begin(self.path, resumed_from)
        self.monitor = Monitor()
        if resumed_from is not None:
            for metrics, step in recorded(directory / "metrics.jsonl", resumed_from):
                self.monitor.see(metrics, step)

    def examine(self, metrics: Mapping[str, object], step: int) -> dict[str, float]:
        """Write and say what is new; the metrics of what goes on."""
        for alert in self.monitor.see(metrics, step):
            self.tell(alert)
        if "timing_s/step" not in metrics:
            return {}
        lasting = {f"health/{name}": 1.0 for name in self.monitor.speaking}
        return {"health/alerts": float(len(lasting)), **lasting}

    def tell(self, alert: Alert) -> None:
        try:
            append(self.path, asdict(alert))
        except OSError as problem:
            log.warning("The alerts cannot be written to %s: %s", self.path, problem)
        log.warning("step %d, %s: %s What to try: %s", alert.step, alert.name, alert.message, alert.advice)


def tell_stall(directory: Path, step: int, phase: str, seconds: float, stacks: str) -> None:
    """An alert about a phase that has not ended yet, from whoever watches the clock."""
    rule = next(rule for rule in RULES if rule.name == "stalled_phase")
    message = f"The phase {phase} has been running for {seconds:.0f} s; what the process does is written in {stacks}."
    alert = Alert(step, time.time(), rule.name, rule.severity, message, rule.advice, {f"timing_s/{phase}": seconds})
    with contextlib.suppress(OSError):  # it was told on the console
        append(directory / ALERTS, asdict(alert))


def recorded(path: Path, last: int | None = None) -> Iterator[tuple[dict[str, object], int]]:
    """Metrics and step of every whole line of a metrics.jsonl, up to the step `last`."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
                metrics, step = dict(row["data"]), int(row["step"])
            except (ValueError, KeyError, TypeError):  # a part of a line, or none of ours
                continue
            if last is None or step <= last:
                yield metrics, step


def verdict(path: Path) -> list[Alert]:
    """The alerts that a recorded run would have given."""
    monitor = Monitor(clock=lambda: 0.0)
    return [alert for metrics, step in recorded(path) for alert in monitor.see(metrics, step)]
