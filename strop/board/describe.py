"""What a run is and how it stands, from its files: one line for the list, its configuration, alerts and checkpoints.

Every file may be missing, half written or damaged. What is wrong with one is said beside what the others tell.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from strop.board.curves import MetricFile
from strop.board.find import ALERTS, CONFIG, METRICS, NotFound, RunFolder
from strop.board.listing import Listings
from strop.board.metric_store import MetricStore
from strop.board.tail import Tail
from strop.config.arithmetic import plan_ppo, plan_supervised
from strop.run.heartbeat import FINISHED, read_beats
from strop.run.layout import read_latest, step_folders, step_of
from strop.run.manifest import NAME as MANIFEST
from strop.run.manifest import DamagedCheckpoint, read_manifest, verify
from strop.run.samples import FOLDER

QUIET = 900.0
"""Seconds without a line after which a run that does not say it is over counts as stopped."""
LARGEST_CONFIG = 8 << 20
MOST_ALERTS = 500
HEADLINES = ("critic/score/mean", "train/loss", "val/loss", "response_length/mean", "actor/entropy", "perf/throughput")


def summary(run: RunFolder, store: MetricStore, listings: Listings) -> dict[str, Any]:
    """The line of a run in the list."""
    damaged: list[str] = []

    def attempt(question: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return question()
        except (NotFound, OSError) as problem:
            damaged.append(str(problem))
            return otherwise

    tree, problem = attempt(lambda: read_config(run), ({}, None))
    damaged += [problem] if problem else []
    headlines = dict(attempt(lambda: store.standing(run.file(METRICS), _headlines), _headlines(MetricFile(run.path))))
    if unreadable := headlines.pop("unreadable"):
        damaged.append(f"{METRICS}: {unreadable} lines cannot be read")
    total = pick(tree, "trainer.total_training_steps")
    return {
        "id": run.id,
        "name": run.name,
        "project": pick(tree, "trainer.project_name"),
        "experiment": pick(tree, "trainer.experiment_name"),
        "algorithm": pick(tree, "algorithm.adv_estimator"),
        "model": pick(tree, "actor_rollout_ref.model.path") or pick(tree, "model.path"),
        "total": total if isinstance(total, int) else None,
        **headlines,
        **_state(run, headlines, total if isinstance(total, int) else None),
        "alerts": attempt(lambda: len(alerts(run)["alerts"]), 0),
        "checkpoints": len(step_folders(run.path)),
        "samples": attempt(lambda: {split: len(steps) for split, steps in listings.steps(run.file(FOLDER)).items()}, {}),
        "damaged": damaged,
    }


def _headlines(file: MetricFile) -> dict[str, Any]:
    validation = next((name for name in file.columns if name.startswith("val-core/")), None)
    shown = [*HEADLINES, *([validation] if validation else [])]
    return {
        "unreadable": file.tail.damaged,
        "step": file.steps[-1] if file.steps else None,
        "started": file.times[0] if file.times else None,
        "updated": file.times[-1] if file.times else None,
        "metrics": {name: file.latest(name) for name in shown if name in file.columns},
        "version": f"{file.tail.generation}.{file.tail.offset}",
    }


def _state(run: RunFolder, metrics: dict[str, Any], total: int | None) -> dict[str, Any]:
    """finished, failed, running or stopped, and the phase of a run that runs."""
    beats = read_beats(run.path)
    if any(beat.failed for beat in beats):
        return {"state": "failed", "phase": None}
    if beats and all(beat.phase == FINISHED for beat in beats):
        return {"state": "finished", "phase": None}
    if not beats and total is not None and (metrics["step"] or 0) >= total:
        return {"state": "finished", "phase": None}
    lately = max([metrics["updated"] or 0.0, *(beat.since for beat in beats)])
    if time.time() - lately > QUIET:
        return {"state": "stopped", "phase": None}
    return {"state": "running", "phase": beats[0].phase if beats else None}


def read_config(run: RunFolder) -> tuple[dict[str, Any], str | None]:
    """The resolved configuration, and what is wrong with its file."""
    path = run.file(CONFIG)
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            return {}, f"{CONFIG} has {path.stat().st_size >> 20} MB, which is no configuration"
        tree = json.loads(path.read_text())
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{CONFIG} cannot be read: {str(error)[:200]}"
    return (tree, None) if isinstance(tree, dict) else ({}, f"{CONFIG} holds no sections")


def config(run: RunFolder) -> dict[str, Any]:
    tree, problem = read_config(run)
    return {"values": dict(flatten(tree)) if tree else {}, "plan": plan(tree), "damaged": [problem] if problem else []}


def flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(key, value) of every leaf; lists and empty sections are leaves.

    >>> flatten({"a": {"b": 1, "c": []}})
    [('a.b', 1), ('a.c', [])]
    """
    if isinstance(tree, dict) and tree:
        return [pair for key, value in tree.items() for pair in flatten(value, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, tree)]


def pick(tree: dict[str, Any], key: str) -> Any:
    found: Any = tree
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def plan(tree: dict[str, Any]) -> list[tuple[str, str, str]] | None:
    """The batch arithmetic of a configuration; None where it lacks what that needs."""
    try:
        config = json.loads(json.dumps(tree), object_hook=lambda section: SimpleNamespace(**section))
        derive = plan_ppo if "actor_rollout_ref" in tree else plan_supervised
        return derive(config).table()
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return None


def alerts(run: RunFolder) -> dict[str, Any]:
    """The newest alerts, newest first."""
    tail = Tail(run.file(ALERTS))
    found = list(tail.new())
    return {"alerts": found[-MOST_ALERTS:][::-1], "damaged": tail.damaged}


def checkpoints(run: RunFolder) -> dict[str, Any]:
    """All checkpoint folders; sizes of their files are compared with what was written, contents are not read."""
    latest = read_latest(run.path)
    found = []
    for path in step_folders(run.path):
        facts: dict[str, Any] = {"step": step_of(path), "name": path.name, "latest": step_of(path) == latest}
        try:
            manifest = read_manifest(path)
            facts |= {
                "bytes": manifest.size,
                "files": len(manifest.files),
                "parts": manifest.parts,
                "metrics": manifest.metrics,
                "saved": _saved_at(path),
            }
            verify(path, manifest.files, contents=lambda _: False)
        except (DamagedCheckpoint, OSError) as problem:
            facts["problem"] = str(problem).replace(f"{run.path}/", "")
        found.append(facts)
    return {"checkpoints": found[::-1], "folder": str(run.path)}


def _saved_at(path: Path) -> float:
    return (path / MANIFEST).stat().st_mtime
