"""Nothing starts that cannot finish: `strop check`, and the first thing every run does.

The configuration is examined first, without torch. Only when it is sound are files, tokenizer, chat template and reward
functions tried. No weights are loaded and no GPU is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from strop.config.arithmetic import Plan, SupervisedPlan, plan_ppo, plan_supervised
from strop.config.commandline import parse
from strop.config.compose import Loaded, load
from strop.config.objective import Role, objective, roles
from strop.config.rules import Finding, check, error, warning

ENOUGH_DISK_GB = 2.0
WRITTEN_TO = ("default_local_dir", "rollout_data_dir", "validation_data_dir")
VERSIONS = ("strop", "torch", "transformers", "hydra-core", "omegaconf", "pyarrow", "safetensors")


@dataclass
class Report:
    """What the preflight found."""

    root: str
    findings: list[Finding] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    plan: Plan | SupervisedPlan | None = None
    roles: list[Role] = field(default_factory=list)
    objective: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    datasets: dict[str, Any] = field(default_factory=dict)
    """Data sets that were read on the way, by split, so that nothing is read twice."""

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def ok(self) -> bool:
        return not self.errors

    def to_json(self) -> str:
        told = asdict(replace(self, datasets={}))
        del told["datasets"]
        return json.dumps({**told, "ok": self.ok}, indent=2, default=str)


def examine(loaded: Loaded) -> Report:
    """Every check, cheapest first."""
    report = Report(loaded.root, check(loaded), list(loaded.notices))
    config = loaded.config
    is_ppo, is_supervised = loaded.root.startswith("ppo"), hasattr(config, "optim")
    if is_ppo:
        report.roles, report.objective = roles(config), objective(config)
        report.plan = plan_ppo(config)
    elif is_supervised:
        report.plan = plan_supervised(config)
    if not report.ok:
        return report
    from strop.trainer.preflight_data import examine_data

    report.versions = _versions()
    rows = examine_data(loaded, report)
    if is_ppo:
        report.plan = plan_ppo(config, rows)
    elif is_supervised:
        report.plan = plan_supervised(config, rows)
    report.findings += (_enough_rows(report.plan, rows) if report.ok else []) + _warmup(config, report.plan) + _folders(config)
    if report.ok and (is_ppo or is_supervised):
        from strop.trainer.preflight_memory import examine_memory

        examine_memory(config, report)
    return report


def _enough_rows(plan: Any, rows: int | None) -> list[Finding]:
    if rows is None or plan is None:
        return []
    needed = plan.prompts_per_step if isinstance(plan, Plan) else plan.rows_per_update
    if rows >= needed:
        return []
    return [
        error("data.train_batch_size", f"{needed} rows per step, but the files have only {rows}. Set it to {rows} or less.")
    ]


def _warmup(config: Any, plan: Any) -> list[Finding]:
    """A learning rate that would only ever rise."""
    if plan is None or plan.total_steps is None:
        return []
    of_actor = isinstance(plan, Plan)
    optim = config.actor_rollout_ref.actor.optim if of_actor else config.optim
    if optim.lr_warmup_steps <= plan.total_steps:
        return []
    said = f"{optim.lr_warmup_steps}, but the run has {plan.total_steps} steps: lr={optim.lr:g} is never reached."
    return [warning(f"{'actor_rollout_ref.actor.' if of_actor else ''}optim.lr_warmup_steps", said)]


def _folders(config: Any) -> list[Finding]:
    """Whether the folders of the run can be written to, and how much room there is."""
    trainer = getattr(config, "trainer", None)
    findings: list[Finding] = []
    for name in WRITTEN_TO:
        folder = getattr(trainer, name, None)
        if folder is None:
            continue
        place = Path(folder).expanduser().absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            findings.append(error(f"trainer.{name}", f"{folder} cannot be a folder: {place} is a file. Name another."))
        elif not os.access(place, os.W_OK | os.X_OK):
            findings.append(
                error(f"trainer.{name}", f"{folder} cannot be written to: {place} does not permit it. Name another.")
            )
        elif (free := shutil.disk_usage(place).free / 1e9) < ENOUGH_DISK_GB:
            findings.append(warning(f"trainer.{name}", f"only {free:.1f} GB are free under {place}."))
    return findings


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": sys.version.split()[0]}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def require(loaded: Loaded) -> Report:
    """Examine, print, and raise when something is wrong; every run calls this before it loads weights."""
    from strop.trainer.preflight_print import announce

    report = examine(loaded)
    if report.ok:
        announce(report)
    else:
        raise ValueError("\n".join(str(finding) for finding in report.errors))
    return report


def main(root: str, arguments: Sequence[str]) -> int:
    """`strop check VERB key=value ... [--json]`"""
    asked = parse(arguments, switches=("--json",))
    as_json = "--json" in asked.switches
    try:
        loaded = load(root, asked.overrides, asked.config, asked.search)
    except ValueError as problem:
        if not as_json:
            raise
        lines = str(problem).splitlines()
        findings = [error(line.partition(":")[0], line.partition(":")[2].strip() or line) for line in lines]
        sys.stdout.write(Report(root, findings).to_json() + "\n")
        return 1
    report = examine(loaded)
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        from strop.trainer.preflight_print import render

        render(report)
    return 0 if report.ok else 1
