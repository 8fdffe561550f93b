"""The report of the preflight, and its text for a terminal, a log file or a program (JSON)."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from strop.config.arithmetic import Plan, SupervisedPlan
from strop.config.derived import Role
from strop.config.rules import ConfigFinding

if TYPE_CHECKING:
    from strop.data.supervised.datasets import SupervisedDataset


@dataclass
class PreflightReport:
    """What the preflight found."""

    root: str
    findings: list[ConfigFinding] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    plan: Plan | SupervisedPlan | None = None
    roles: list[Role] = field(default_factory=list)
    objective: str | None = None
    data: dict[str, object] = field(default_factory=dict)
    """Facts about the data, by name."""
    versions: dict[str, str] = field(default_factory=dict)
    datasets: dict[str, SupervisedDataset] = field(default_factory=dict)
    """Data sets that were read for the checks, by split. The trainer takes them, so nothing is read twice."""

    @property
    def errors(self) -> list[ConfigFinding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def ok(self) -> bool:
        return not self.errors

    def to_json(self) -> str:
        fields = asdict(replace(self, datasets={}))
        del fields["datasets"]
        return json.dumps({**fields, "ok": self.ok}, indent=2, default=str)


def announce(report: PreflightReport) -> None:
    """At the start of a run: the whole report on a terminal, otherwise one line per fact."""
    if sys.stdout.isatty():
        render(report)
        return
    for line in lines(report):
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def lines(report: PreflightReport) -> list[str]:
    """The report as plain lines."""
    found = []
    if report.plan is not None:
        found.append("plan: " + ", ".join(f"{name} {value}" for name, value, _ in report.plan.table()))
    if report.objective:
        found.append(f"objective: {report.objective}")
    if report.roles:
        found.append("roles: " + ", ".join(f"{role.name} {_yes_or_no(role)}" for role in report.roles))
    for name, value in report.data.items():
        found.append(f"{name}: {value}")
    for notice in report.notices:
        found.append(f"note: {notice}")
    for finding in report.findings:
        found.append(f"{finding.level}: {finding}")
    return found


def render(report: PreflightReport) -> None:
    """Print the report with aligned columns."""
    out = sys.stdout.write
    if report.objective:
        out(f"objective  {report.objective}\n")
    for role in report.roles:
        out(f"{role.name:<16} {_yes_or_no(role):<4} {role.why}\n")
    if report.plan is not None:
        rows = report.plan.table()
        name_width = max(len(row[0]) for row in rows)
        value_width = max(len(row[1]) for row in rows)
        out("\n")
        for name, value, why in rows:
            out(f"{name:<{name_width}}  {value:>{value_width}}  {why}\n")
    for name, fact in report.data.items():
        out(f"{name}: {fact}\n")
    out("\n" + ", ".join(f"{name} {version}" for name, version in report.versions.items()) + "\n")
    for notice in report.notices:
        out(f"note     {notice}\n")
    for finding in sorted(report.findings, key=lambda f: f.level == "error"):
        out(f"{finding.level:<8} {finding}\n")
    if report.ok:
        out("\nready to run\n")
    else:
        out(f"\n{len(report.errors)} error(s): nothing was started\n")


def _yes_or_no(role: Role) -> str:
    return "yes" if role.exists else "no"
