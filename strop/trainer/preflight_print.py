"""The preflight's report: tables for people at a terminal, a few lines for a log file."""

from __future__ import annotations

import sys

from strop.trainer.preflight import Report


def announce(report: Report) -> None:
    """At the start of a run: the whole report on a terminal, otherwise one line for each thing."""
    if sys.stdout.isatty():
        render(report)
        return
    for line in lines(report):
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def lines(report: Report) -> list[str]:
    """The report without its layout."""
    found = []
    if report.plan is not None:
        found.append("plan: " + ", ".join(f"{name} {value}" for name, value, _ in report.plan.table()))
    if report.objective:
        found.append(f"objective: {report.objective}")
    if report.roles:
        found.append("roles: " + ", ".join(f"{role.name} {'yes' if role.exists else 'no'}" for role in report.roles))
    found += [f"{name}: {value}" for name, value in report.data.items()]
    found += [f"note: {notice}" for notice in report.notices]
    return found + [f"{finding.level}: {finding}" for finding in report.findings]


def render(report: Report) -> None:
    """Plain text when something is wrong (it must be quick and easy to copy), tables when all is well."""
    out = sys.stdout.write
    if report.objective:
        out(f"objective  {report.objective}\n")
    for role in report.roles:
        out(f"{role.name:<16} {'yes' if role.exists else 'no':<4} {role.why}\n")
    if report.plan is not None:
        rows = report.plan.table()
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        out("\n")
        for name, value, why in rows:
            out(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {why}\n")
    for name, value in report.data.items():
        out(f"{name}: {value}\n")
    out("\n" + ", ".join(f"{name} {version}" for name, version in report.versions.items()) + "\n")
    for notice in report.notices:
        out(f"note     {notice}\n")
    for finding in sorted(report.findings, key=lambda f: f.level == "error"):
        out(f"{finding.level:<8} {finding}\n")
    out("\nready to run\n" if report.ok else f"\n{len(report.errors)} error(s): nothing was started\n")
