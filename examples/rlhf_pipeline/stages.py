"""Stages of a pipeline as `strop` commands in the current folder: models/, answers/, logs/, and a folder for
each training.

A script on top of this says which stages there are; a `Check` says whether one did what it is for.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = {"ppo": "actor"}
"""Which model of a checkpoint a stage is there for; of sft, rm and dpo there is one."""


@dataclass
class Check:
    """One stage against the one before."""

    stage: str
    what: str
    before: float
    after: float
    passed: bool


def strop(verb: str, *arguments: str) -> None:
    """Run a command; what it says goes to logs/."""
    begun, used = time.time(), cpu_seconds()
    print(f"$ strop {verb} {' '.join(arguments)}", flush=True)
    Path("logs").mkdir(exist_ok=True)
    log = Path("logs") / f"{len(list(Path('logs').iterdir())) + 1:02d}_{verb}.log"
    command = [sys.executable, "-m", "strop.cli", verb, *arguments]
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        sys.exit(
            f"strop {verb} failed with exit code {code}; the end of "
            f"{log.resolve()}:\n{log.read_text()[-3000:]}"
        )
    print(f"  {time.time() - begun:.0f} s ({cpu_seconds() - used:.0f} s of a core), {log}", flush=True)


def cpu_seconds() -> float:
    """What the commands so far have computed, and this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime + time.process_time()


def train(verb: str, config: Path, *overrides: str) -> None:
    """Run a training; its model comes to models/<verb>."""
    strop(verb, str(config / f"{verb}.yaml"), *overrides)
    step = Path(verb, "latest_checkpointed_iteration.txt").read_text().strip()
    shutil.copytree(
        Path(verb, f"global_step_{step}", ROLES.get(verb, "model"), "huggingface"), Path("models", verb)
    )


def answer(model: str, config: Path, split: str = "test", *overrides: str, path: str | None = None) -> Path:
    """The answers of models/<model> (or of the model at `path`) to the prompts of a split."""
    out = Path("answers", f"{model}_{split}.parquet")
    places = (
        f"model.path={path or f'models/{model}'}",
        f"data.path=data/{split}.parquet",
        f"data.output_path={out}",
    )
    strop("generate", str(config / "generate.yaml"), *places, *overrides)
    return out


def compare(before: str, after: str, *overrides: str) -> dict[str, Any]:
    """What `strop eval --compare` finds out about the answers of two models, which have one data source."""
    report = Path("answers", f"{before}_{after}.json")
    files = (f"answers/{name}_test.parquet" for name in (before, after))
    strop("eval", "--compare", *files, *overrides, f"data.output_path={report}")
    [found] = json.loads(report.read_text())["sources"].values()
    return dict(found)


def measured(stage: str, metric: str) -> list[float]:
    """A metric of a training, whenever it was taken."""
    lines = Path(stage, "metrics.jsonl").read_text().splitlines()
    return [data[metric] for data in (json.loads(line)["data"] for line in lines) if metric in data]


def enter(out: Path) -> None:
    """Make the folder and work in it; an earlier run is removed, anything else is left alone and refused."""
    marker = out / "made_by_a_pipeline"
    if out.exists() and any(out.iterdir()) and not marker.exists():
        sys.exit(f"--out {out} holds something that this script did not make. Name another folder.")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    marker.touch()
    os.chdir(out)


def conclude(checks: Sequence[Check], begun: float) -> int:
    """Print every stage against the one before; returns the exit code."""
    width = max(len(check.what) for check in checks) + 2
    print(f"\n{'stage':<8}{'measure':<{width}}{'before':>8}{'after':>8}")
    for check in checks:
        verdict = "ok" if check.passed else "FAILED"
        print(f"{check.stage:<8}{check.what:<{width}}{check.before:>8.3f}{check.after:>8.3f}  {verdict}")
    print(f"\n{time.time() - begun:.0f} s in all, {cpu_seconds():.0f} s of a core.")
    failed = [check.stage for check in checks if not check.passed]
    if failed:
        print(f"Not better than before: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0
