"""The preflight: `strop check`, and the first thing every run does.

The configuration is checked first, without torch. If it has no errors, files, tokenizer, chat template and
reward functions are tried. No weights are loaded and no GPU is needed.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strop.config.arithmetic import Plan, SupervisedPlan, plan_ppo, plan_supervised
from strop.config.commandline import parse
from strop.config.compose import Loaded, load
from strop.config.derived import has_critic, roles
from strop.config.objective import objective
from strop.config.rules import ConfigFinding, check, error, warning
from strop.config.schema.inference import EvaluationConfig, GenerationConfig
from strop.config.schema.model import OptimConfig
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.supervised import SupervisedConfig
from strop.preflight.report import PreflightReport, announce, render
from strop.registry import load_attribute

if TYPE_CHECKING:
    from strop.config.schema.roots import RootConfig
    from strop.shared.in_process import InProcess

log = logging.getLogger(__name__)
ENOUGH_DISK_GB = 2.0
WRITTEN_TO = ("default_local_dir", "rollout_data_dir", "validation_data_dir")
VERSIONS = ("strop", "torch", "transformers", "hydra-core", "omegaconf", "pyarrow", "safetensors")


def examine(loaded: Loaded[RootConfig], given: InProcess | None = None) -> PreflightReport:
    """Every check, cheapest first. `given` are objects of the caller."""
    config = loaded.config
    report = PreflightReport(loaded.root, check(loaded), list(loaded.notices))
    report.plan = _plan(config)
    if isinstance(config, PpoConfig):
        report.roles = roles(config)
        report.objective = objective(config)
    if not report.ok:
        return report
    report.versions = _versions()
    rows = examine_data(config, report, given)
    report.plan = _plan(config, rows)
    if report.ok:
        report.findings += _enough_rows(config, report.plan, rows)
    if isinstance(config, PpoConfig):
        report.findings += _user_classes(config)
    report.findings += _schedules(config, report.plan)
    report.findings += _folders(config)
    from strop.preflight.device_checks import device_notices, examine_memory

    report.notices += device_notices(config)
    if report.ok and isinstance(config, PpoConfig | SupervisedConfig):
        examine_memory(config, report)
        report.data["output"] = config.trainer.default_local_dir
    return report


def examine_data(config: RootConfig, report: PreflightReport, given: InProcess | None = None) -> int | None:
    """Check files, tokenizer and reward functions; returns the number of training rows where it is known."""
    if isinstance(config, PpoConfig):
        from strop.preflight.ppo import examine_ppo

        return examine_ppo(config, report, given)
    if isinstance(config, SupervisedConfig):
        from strop.preflight.supervised import examine_supervised

        return examine_supervised(config, report)
    from strop.preflight.inference import examine_inference

    return examine_inference(config, report)


def _plan(config: RootConfig, rows: int | None = None) -> Plan | SupervisedPlan | None:
    if isinstance(config, PpoConfig):
        return plan_ppo(config, rows)
    if isinstance(config, SupervisedConfig):
        return plan_supervised(config, rows)
    return None


def _enough_rows(
    config: RootConfig, plan: Plan | SupervisedPlan | None, rows: int | None
) -> list[ConfigFinding]:
    if rows is None or plan is None:
        return []
    key = "data.train_batch_size"
    needed = plan.prompts_per_step if isinstance(plan, Plan) else plan.rows_per_update
    if isinstance(config, PpoConfig) and config.algorithm.filter_groups.enable and config.data.gen_batch_size:
        key = "data.gen_batch_size"
        needed = config.data.gen_batch_size
    if rows >= needed:
        return []
    message = f"{needed} rows per step, but the files have only {rows}. Set it to {rows} or less."
    return [error(key, message)]


def _user_classes(config: PpoConfig) -> list[ConfigFinding]:
    """Whether the files of a data set and of a sampler of the user's own have the classes that are named."""
    data = config.data
    findings: list[ConfigFinding] = []
    for key, path, name in (
        ("data.custom_cls.path", data.custom_cls.path, data.custom_cls.name),
        ("data.sampler.class_path", data.sampler.class_path, data.sampler.class_name),
    ):
        if path and not name:
            findings.append(error(key, f"{path} is set, but not the name of the class in it."))
        elif path and name:
            try:
                load_attribute(path, name)
            except ValueError as problem:
                findings.append(error(key, str(problem)))
    return findings


def _schedules(config: RootConfig, plan: Plan | SupervisedPlan | None) -> list[ConfigFinding]:
    """A warm-up that is longer than the run, and a decay that ends before it."""
    if plan is None or plan.total_steps is None:
        return []
    optim: OptimConfig
    if isinstance(config, PpoConfig):
        key = "actor_rollout_ref.actor.optim"
        optim = config.actor_rollout_ref.actor.optim
    else:
        assert isinstance(config, SupervisedConfig)
        key = "optim"
        optim = config.optim
    found = []
    if optim.lr_warmup_steps > plan.total_steps:
        message = f"the run has {plan.total_steps} steps: lr={optim.lr:g} is never reached."
        found.append(warning(f"{key}.lr_warmup_steps", f"{optim.lr_warmup_steps}, but {message}"))
    if 0 < optim.total_training_steps < plan.total_steps and optim.lr_scheduler_type != "constant":
        message = (
            f"{optim.total_training_steps}, but the run has {plan.total_steps} steps: later ones keep the "
            f"lowest learning rate of {optim.lr_scheduler_type}. Set -1 for the length of the run."
        )
        found.append(warning(f"{key}.total_training_steps", message))
    if isinstance(config, PpoConfig) and has_critic(config):
        first = config.trainer.critic_warmup
        if first > plan.total_steps:
            message = f"{first}, but the run has {plan.total_steps} steps: the actor is never trained."
            found.append(warning("trainer.critic_warmup", message))
    return found


def _folders(config: RootConfig) -> list[ConfigFinding]:
    """Whether the folders of the run can be written to, and whether the disk has room."""
    trainer = getattr(config, "trainer", None)
    findings: list[ConfigFinding] = []
    for name in WRITTEN_TO:
        folder = getattr(trainer, name, None)
        if folder is not None:
            findings += _folder_findings(f"trainer.{name}", folder)
    copies = getattr(trainer, "default_hdfs_dir", None)
    if copies is not None:
        findings += _address_findings("trainer.default_hdfs_dir", copies)
    if isinstance(config, GenerationConfig) and "://" not in str(config.data.output_path):
        findings += _folder_findings("data.output_path", str(Path(str(config.data.output_path)).parent))
    return findings


def _address_findings(key: str, address: str) -> list[ConfigFinding]:
    """Whether there is a library for the file system of an address, and whether it starts."""
    import fsspec

    try:
        fsspec.core.url_to_fs(address)
    except (ValueError, ImportError, OSError) as problem:
        reason = str(problem).partition("\n")[0]
        return [error(key, f"{address} cannot be used: {reason}.", about_machine=True)]
    return []


def _folder_findings(key: str, folder: str) -> list[ConfigFinding]:
    place = Path(folder).expanduser().absolute()
    try:
        while not place.exists() and not place.is_symlink():
            place = place.parent
    except OSError as problem:  # a name that is too long, or a folder that may not be searched
        return [error(key, f"{folder} cannot be a folder: {problem.strerror}. Name another.")]
    if not place.exists():
        return [error(key, f"{folder} cannot be a folder: the link {place} leads nowhere. Name another.")]
    if not place.is_dir():
        return [error(key, f"{folder} cannot be a folder: {place} is a file. Name another.")]
    if not os.access(place, os.W_OK | os.X_OK):
        return [error(key, f"{folder} cannot be written to: {place} does not permit it. Name another.")]
    free = shutil.disk_usage(place).free / 1e9
    if free < ENOUGH_DISK_GB:
        return [warning(key, f"only {free:.1f} GB are free under {place}.")]
    return []


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": sys.version.split()[0]}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def require(
    loaded: Loaded[RootConfig], given: InProcess | None = None, *, quiet: bool = False
) -> PreflightReport:
    """Examine and print; raises when something is wrong. Every run calls this before it loads weights."""
    report = examine(loaded, given)
    lacking = [finding for finding in report.findings if finding.about_machine]
    if report.ok and lacking:
        raise ValueError("\n".join(str(finding) for finding in lacking))
    if report.ok and quiet:
        for finding in report.findings:
            log.warning("%s", finding)
    elif report.ok:
        announce(report)
    else:
        raise ValueError("\n".join(str(finding) for finding in report.errors))
    return report


def main(root: str, arguments: Sequence[str]) -> int:
    """`strop check VERB key=value ... [--json]`"""
    options = parse(arguments, switches=("--json",))
    as_json = "--json" in options.switches
    try:
        loaded = load(root, options.overrides, options.config, options.search)
    except ValueError as problem:
        if not as_json:
            raise
        lines = str(problem).splitlines()
        findings: list[ConfigFinding] = []
        for line in lines:
            key, _, message = line.partition(":")
            findings.append(error(key, message.strip() or line))
        sys.stdout.write(PreflightReport(root, findings).to_json() + "\n")
        return 1
    report = examine(loaded)
    if report.ok and isinstance(loaded.config, EvaluationConfig):
        from strop.preflight.inference import scoring_findings

        report.findings += scoring_findings(loaded.config)
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        render(report)
    return 0 if report.ok else 1
