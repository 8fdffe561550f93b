"""Alerts about a run: rules over its metrics, reported once per episode with a message and what to try.

    health = HealthMonitor(directory)
    metrics |= health.examine(metrics, step)

An episode begins when a rule finds something and ends when it has found nothing for QUIET_STEPS steps. It
begins with a line in alerts.jsonl and on the console; while it lasts `health/<name>` is 1.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from strop.config.schema.model import FsdpConfig
from strop.run.health.history import History
from strop.run.health.rules import RULES, Rule
from strop.run.trackers.files import append, begin

log = logging.getLogger(__name__)

QUIET_STEPS = 10
ALERTS = "alerts.jsonl"


@dataclass(frozen=True)
class Alert:
    """A line of alerts.jsonl."""

    step: int
    time: float
    name: str
    severity: str
    message: str
    advice: str
    values: dict[str, float]


class RuleMonitor:
    """Applies the rules to a history and groups what they find into episodes. Reads and writes no files."""

    def __init__(
        self,
        rules: Sequence[Rule] = RULES,
        clock: Callable[[], float] = time.time,
        precision: str = FsdpConfig.dtype,
    ):
        self.rules = rules
        self.clock = clock
        self.history = History(precision)
        self.open_episodes: dict[str, int] = {}
        """Rule of each open episode -> training step, counted from the start, of its last finding."""

    def add(self, metrics: Mapping[str, object], step: int) -> list[Alert]:
        """Add the metrics of a step; returns the alerts of the episodes that begin with it."""
        self.history.add(metrics, step)
        if "timing_s/step" not in metrics:  # a validation by itself
            return []
        begun = []
        for rule in self.rules:
            finding = rule.look(self.history)
            if finding is not None:
                if rule.name not in self.open_episodes:
                    begun.append(
                        Alert(
                            step,
                            self.clock(),
                            rule.name,
                            rule.severity,
                            finding.message,
                            rule.advice,
                            finding.values,
                        )
                    )
                self.open_episodes[rule.name] = self.history.steps
            elif self.history.steps - self.open_episodes.get(rule.name, self.history.steps) >= QUIET_STEPS:
                del self.open_episodes[rule.name]
        return begun


class HealthMonitor:
    """Monitors a run, writes its alerts, and continues its history when the run resumes."""

    def __init__(self, directory: Path, resumed_from: int | None = None, precision: str = FsdpConfig.dtype):
        self.path = directory / ALERTS
        directory.mkdir(parents=True, exist_ok=True)
        begin(self.path, resumed_from)
        self.monitor = RuleMonitor(precision=precision)
        if resumed_from is not None:
            for metrics, step in read_metrics(directory / "metrics.jsonl", resumed_from):
                self.monitor.add(metrics, step)

    def examine(self, metrics: Mapping[str, object], step: int) -> dict[str, float]:
        """Write and log new alerts; returns the metrics of the open episodes."""
        for alert in self.monitor.add(metrics, step):
            self.report(alert)
        if "timing_s/step" not in metrics:
            return {}
        lasting = {f"health/{name}": 1.0 for name in self.monitor.open_episodes}
        return {"health/alerts": float(len(lasting)), **lasting}

    def report(self, alert: Alert) -> None:
        try:
            append(self.path, asdict(alert))
        except OSError as problem:
            log.warning("The alerts cannot be written to %s: %s", self.path, problem)
        log.warning("step %d, %s: %s What to try: %s", alert.step, alert.name, alert.message, alert.advice)


def write_stall_alert(directory: Path, step: int, phase: str, seconds: float, stacks: str) -> None:
    """Write an alert about a phase that has not ended yet; called by the watchdog."""
    rule = next(rule for rule in RULES if rule.name == "stalled_phase")
    message = (
        f"The phase {phase} has been running for {seconds:.0f} s; what the process does is written in "
        f"{stacks}."
    )
    alert = Alert(
        step, time.time(), rule.name, rule.severity, message, rule.advice, {f"timing_s/{phase}": seconds}
    )
    with contextlib.suppress(OSError):  # the watchdog has logged it
        append(directory / ALERTS, asdict(alert))


def read_metrics(path: Path, last: int | None = None) -> Iterator[tuple[dict[str, object], int]]:
    """Metrics and step of every complete line of a metrics.jsonl, up to the step `last`."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
                metrics = dict(row["data"])
                step = int(row["step"])
            # an incomplete line, or one of another program
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue
            if last is None or step <= last:
                yield metrics, step


def replay_alerts(path: Path) -> list[Alert]:
    """The alerts that a recorded run gives."""
    monitor = RuleMonitor(clock=lambda: 0.0)
    alerts: list[Alert] = []
    for metrics, step in read_metrics(path):
        alerts += monitor.add(metrics, step)
    return alerts
