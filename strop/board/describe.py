"""Summaries of a run from its files: its line in the list of runs, its configuration, alerts and checkpoints.

Every file may be missing, incomplete or damaged. The problem of one file is reported together with what the
others say.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from strop.board.curves import FileTail, MetricFile, MetricStore
from strop.board.notes import BadNote, Notes, read_notes
from strop.board.run_index import ALERTS, CONFIG, METRICS, NotFound, RunFolder, StepListingCache
from strop.config.arithmetic import plan_ppo, plan_supervised
from strop.run.checkpoint.layout import (
    MANIFEST,
    DamagedCheckpoint,
    read_latest,
    read_manifest,
    step_folders,
    step_of,
    verify,
)
from strop.run.doctor import is_alive
from strop.run.heartbeat import (
    FINISHED,
    STOPPED_BY_SIGNAL,
    WorkerState,
    last_sign_of_life,
    read_worker_states,
)
from strop.run.sample_table import FOLDER

T = TypeVar("T")

STOPPED_AFTER = 900.0
"""Seconds without a sign of life after which a run that has not finished counts as stopped."""
QUIET = 180.0
"""The same if its processes were on this machine and are gone. Workers give a sign every minute; processes of
a container that shares its host's name have other ids there, so they seem to be gone."""
MAX_CONFIG_BYTES = 8 << 20
MAX_ALERTS = 500
HEADLINES = (
    "critic/score/mean",
    "train/loss",
    "val/loss",
    "response_length/mean",
    "actor/entropy",
    "perf/throughput",
)


def broken_summary(run: RunFolder, problem: str) -> dict[str, object]:
    """The line of a run of which nothing can be read."""
    missing = ("project", "experiment", "algorithm", "model", "family", "total", "step", "started", "updated")
    return {
        **dict.fromkeys((*missing, "phase")),
        "id": run.id,
        "name": run.name,
        "metrics": {},
        "version": "",
        "state": "stopped",
        "alerts": 0,
        "checkpoints": 0,
        "samples": {},
        "note": "",
        "tags": [],
        "damaged": [problem],
    }


def summary(run: RunFolder, store: MetricStore, listings: StepListingCache) -> dict[str, object]:
    """The line of a run in the list."""
    damaged: list[str] = []

    def attempt(question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except (NotFound, BadNote, OSError) as problem:
            damaged.append(str(problem))
            return otherwise

    no_config: tuple[dict[str, object], str | None] = ({}, None)
    no_samples: dict[str, int] = {}
    no_notes: Notes = {"note": "", "tags": []}
    tree, problem = attempt(lambda: read_config(run), no_config)
    if problem:
        damaged.append(problem)
    headlines = dict(
        attempt(lambda: store.cached(run.file(METRICS), _headlines), _headlines(MetricFile(run.path)))
    )
    if unreadable := headlines.pop("unreadable"):
        damaged.append(f"{METRICS}: {unreadable} lines cannot be read")
    total = pick(tree, "trainer.total_training_steps")
    if not isinstance(total, int):
        total = None
    return {
        "id": run.id,
        "name": run.name,
        "project": _text(tree, "trainer.project_name"),
        "experiment": _text(tree, "trainer.experiment_name"),
        "algorithm": _text(tree, "algorithm.adv_estimator"),
        "model": _text(tree, "actor_rollout_ref.model.path") or _text(tree, "model.path"),
        "family": family(tree) if tree else None,
        "total": total,
        **headlines,
        **attempt(lambda: read_notes(run), no_notes),
        **_state(run, headlines, total),
        "alerts": attempt(lambda: len(_latest_alerts(run)[0]), 0),
        "checkpoints": len(step_folders(run.path)),
        "samples": attempt(
            lambda: {split: len(steps) for split, steps in listings.steps(run.file(FOLDER)).items()},
            no_samples,
        ),
        "damaged": damaged,
    }


def _headlines(file: MetricFile) -> dict[str, object]:
    shown = list(HEADLINES)
    for name in file.columns:
        if name.startswith("val-core/"):
            shown.append(name)
            break
    metrics: dict[str, object] = {}
    for name in shown:
        if name in file.columns:
            metrics[name] = file.latest(name)
    ends: list[float | None] = [None, None]
    if file.times:  # a line that another program wrote may have no time
        ends = [time if math.isfinite(time) else None for time in (file.times[0], file.times[-1])]
    return {
        "unreadable": file.tail.damaged,
        "step": file.steps[-1] if file.steps else None,
        "started": ends[0],
        "updated": ends[1],
        "metrics": metrics,
        "version": f"{file.tail.generation}.{file.tail.offset}",
    }


def _state(run: RunFolder, metrics: dict[str, Any], total: int | None) -> dict[str, object]:
    """finished, failed, running or stopped, and the phase of a run that runs."""
    workers = read_worker_states(run.path)
    if any(worker.failed for worker in workers):
        return {"state": "failed", "phase": None}
    if workers and all(worker.phase == FINISHED for worker in workers):
        return {"state": "finished", "phase": None}
    if workers and all(worker.phase == STOPPED_BY_SIGNAL for worker in workers):
        return {"state": "stopped", "phase": None}
    if not workers and total is not None and (metrics["step"] or 0) >= total:
        return {"state": "finished", "phase": None}
    signs = [metrics["updated"] or 0.0]
    if workers:
        signs.append(last_sign_of_life(run.path))
    last_sign = max((sign for sign in signs if math.isfinite(sign)), default=0.0)
    silence = time.time() - last_sign
    if silence > STOPPED_AFTER or (silence > QUIET and workers and all(map(_is_gone, workers))):
        return {"state": "stopped", "phase": None}
    return {"state": "running", "phase": workers[0].phase if workers else None}


def _is_gone(worker: WorkerState) -> bool:
    """Whether a worker has ended, as far as this machine knows."""
    return worker.over or (worker.host == socket.gethostname() and not is_alive(worker))


def read_config(run: RunFolder) -> tuple[dict[str, object], str | None]:
    """The resolved configuration, and what is wrong with its file."""
    path = run.file(CONFIG)
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            return {}, f"{CONFIG} has {path.stat().st_size >> 20} MB, which is no configuration"
        tree = json.loads(path.read_text())
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{CONFIG} cannot be read: {str(error)[:200]}"
    if not isinstance(tree, dict):
        return {}, f"{CONFIG} holds no sections"
    return tree, None


def config(run: RunFolder) -> dict[str, object]:
    tree, problem = read_config(run)
    return {
        "values": dict(flatten(tree)) if tree else {},
        "plan": plan(tree),
        "damaged": [problem] if problem else [],
    }


def flatten(tree: object, prefix: str = "") -> list[tuple[str, object]]:
    """(key, value) of every leaf; lists and empty sections are leaves.

    >>> flatten({"a": {"b": 1, "c": []}})
    [('a.b', 1), ('a.c', [])]
    """
    if isinstance(tree, dict) and tree:
        leaves = []
        for key, value in tree.items():
            leaves += flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return leaves
    return [(prefix, tree)]


def pick(tree: dict[str, object], key: str) -> object:
    """The value of a dotted key; None where it is missing."""
    found: object = tree
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _text(tree: dict[str, object], key: str) -> str | None:
    """The value of a dotted key if it is a text: pages show nothing else."""
    found = pick(tree, key)
    return found if isinstance(found, str) else None


OWN_TO_A_RUN = frozenset(
    ("project_name", "experiment_name", "default_local_dir", "rollout_data_dir", "validation_data_dir")
)
"""Last words of keys that differ between runs of one experiment."""


def family(tree: dict[str, object]) -> str:
    """The same text for runs whose configurations differ in their seeds, names and folders alone."""
    counted = []
    for key, value in flatten(tree):
        word = key.rpartition(".")[2]
        if "seed" not in word and word not in OWN_TO_A_RUN:
            counted.append(f"{key}={value!r}")
    return hashlib.blake2s("\n".join(sorted(counted)).encode(), digest_size=6).hexdigest()


def plan(tree: dict[str, object]) -> list[tuple[str, str, str]] | None:
    """The batch arithmetic of a configuration; None where it lacks what that needs."""
    try:
        config = json.loads(json.dumps(tree), object_hook=lambda section: SimpleNamespace(**section))
        derive = plan_ppo if "actor_rollout_ref" in tree else plan_supervised
        return derive(config).table()
    except (AttributeError, TypeError, ValueError, ArithmeticError):  # also infinite and endless numbers
        return None


def alerts(run: RunFolder) -> dict[str, object]:
    """The newest alerts, newest first."""
    found, damaged = _latest_alerts(run)
    return {"alerts": found, "damaged": damaged}


def _latest_alerts(run: RunFolder) -> tuple[list[dict[str, object]], int]:
    """The newest alerts, newest first, and the number of unreadable lines."""
    tail = FileTail(run.file(ALERTS))
    found = list(tail.new())
    return found[-MAX_ALERTS:][::-1], tail.damaged


def checkpoints(run: RunFolder) -> dict[str, object]:
    """All checkpoint folders; sizes of their files are compared with what was written, contents are not
    read."""
    latest = read_latest(run.path)
    found = []
    for path in step_folders(run.path):
        facts: dict[str, object] = {
            "step": step_of(path),
            "name": path.name,
            "latest": step_of(path) == latest,
        }
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
