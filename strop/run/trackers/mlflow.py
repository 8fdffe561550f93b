"""MLflow, at MLFLOW_TRACKING_URI or in mlflow.db (sqlite) in the run's folder. `@` is not allowed there:
mean@1 is mean_at_1.

The configuration is there as parameters and whole as config.json; samples are JSON files with columns and
rows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping

from strop.extras import require
from strop.run.atomic_files import to_json
from strop.run.trackers.base import Metrics, Rows, TrackedRun, columns_of, save_id, saved_id

MAX_VALUE_LENGTH = 500
MAX_NAME_LENGTH = 250
BATCH_SIZE = 100
"""Parameters and metrics of one request, as MLflow limits them."""


class MlflowTracker:
    def __init__(self, run: TrackedRun):
        mlflow = require("mlflow", extra="mlflow", why="trainer.logger=mlflow")
        self.entities = mlflow.entities
        self.status = "FINISHED"
        self.names = Names()
        run.directory.mkdir(parents=True, exist_ok=True)
        directory = run.directory.absolute()
        address = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = mlflow.MlflowClient(tracking_uri=address or f"sqlite:///{directory}/mlflow.db")
        experiment = self.client.get_experiment_by_name(run.project)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            artifacts = None if address else (directory / "mlflow_artifacts").as_uri()
            number = self.client.create_experiment(run.project, artifacts)
        self.id = self._begin(run, number)

    def _begin(self, run: TrackedRun, experiment: str) -> str:
        known = saved_id(run, "mlflow")
        if known is not None:
            self.client.update_run(known, status="RUNNING")
            return known
        made = self.client.create_run(experiment, run_name=run.experiment).info.run_id
        save_id(run, "mlflow", made)
        names = Names()
        parameters = [self.entities.Param(names[key], value) for key, value in flat_parameters(run.config)]
        for start in range(0, len(parameters), BATCH_SIZE):
            self.client.log_batch(made, params=parameters[start : start + BATCH_SIZE])
        self.client.log_text(made, to_json(run.config, indent=1), "config.json")
        return made

    def log(self, metrics: Metrics, step: int) -> None:
        now = int(time.time() * 1000)
        numbers = []
        for name, value in metrics.items():
            if not isinstance(value, str):
                numbers.append(self.entities.Metric(self.names[name], float(value), now, step))
        for start in range(0, len(numbers), BATCH_SIZE):
            self.client.log_batch(self.id, metrics=numbers[start : start + BATCH_SIZE])

    def log_generations(self, rows: Rows, step: int) -> None:
        columns = columns_of(rows)
        table = {"columns": columns, "data": [[row.get(key) for key in columns] for row in rows]}
        self.client.log_text(self.id, to_json(table), f"val_generations/step_{step}.json")

    def mark_failed(self, reason: str) -> None:
        self.status = "FAILED"
        self.client.set_tag(self.id, "error", reason[:MAX_VALUE_LENGTH])

    def close(self) -> None:
        self.client.set_terminated(self.id, status=self.status)


def allowed_name(name: str) -> str:
    """A metric name with the characters, and of the length, that MLflow allows.

    >>> allowed_name("val-core//data/./math/acc/")
    'val-core/data/math/acc'
    >>> allowed_name("val-core/gsm8k/acc/mean@1"), allowed_name("reward/a+b/mean")
    ('val-core/gsm8k/acc/mean_at_1', 'reward/a_b/mean')
    """
    plain = "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in name.replace("@", "_at_"))
    # It is also a path: empty parts, `.` and `..` are refused, and any name that begins with `..`.
    short = _without_dots(plain)
    if short.startswith(".."):
        short = f"_{short}"
    return _without_dots(short[:MAX_NAME_LENGTH]) or "_"


def _without_dots(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))


class Names(dict[str, str]):
    """Allowed names by name. Those that would be the same get a number: MLflow refuses parameters of one
    name, and would draw metrics of one name as one curve."""

    def __missing__(self, name: str) -> str:
        allowed = allowed_name(name)
        found = allowed
        number = 1
        while found in self.values():
            number += 1
            found = f"{allowed[: MAX_NAME_LENGTH - 8]}_{number}"
        self[name] = found
        return found


def flat_parameters(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a tree with its value as text, cut to the length that MLflow allows."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_parameters(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text[:MAX_VALUE_LENGTH]
