"""MLflow, at MLFLOW_TRACKING_URI or in mlflow.db (sqlite) in the run's folder. `@` is not allowed there: mean@1 is mean_at_1.

The configuration is there as parameters and whole as config.json; samples are JSON files with columns and rows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from strop.extras import require
from strop.run.plain_json import to_json
from strop.run.trackers.identity import known_id, remember_id
from strop.run.tracking import Metrics, Rows, Run

LONGEST_VALUE = 500
AT_ONCE = 100
"""Parameters and metrics of one request, as MLflow limits them."""


class MlflowTracker:
    def __init__(self, run: Run):
        mlflow = require("mlflow", extra="mlflow", why="trainer.logger=mlflow")
        self.entities = mlflow.entities
        run.directory.mkdir(parents=True, exist_ok=True)
        here = run.directory.absolute()
        address = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = mlflow.MlflowClient(tracking_uri=address or f"sqlite:///{here}/mlflow.db")
        experiment = self.client.get_experiment_by_name(run.project)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            number = self.client.create_experiment(run.project, None if address else (here / "mlflow_artifacts").as_uri())
        self.id = self._begin(run, number)

    def _begin(self, run: Run, experiment: str) -> str:
        known = known_id(run, "mlflow")
        if known is not None:
            self.client.update_run(known, status="RUNNING")
            return known
        made = self.client.create_run(experiment, run_name=run.experiment).info.run_id
        remember_id(run, "mlflow", made)
        parameters = [self.entities.Param(name, value) for name, value in flat(run.config)]
        for start in range(0, len(parameters), AT_ONCE):
            self.client.log_batch(made, params=parameters[start : start + AT_ONCE])
        self.client.log_text(made, to_json(run.config, indent=1), "config.json")
        return made

    def log(self, metrics: Metrics, step: int) -> None:
        now = int(time.time() * 1000)
        numbers = [
            self.entities.Metric(allowed(name), float(value), now, step)
            for name, value in metrics.items()
            if not isinstance(value, str)
        ]
        for start in range(0, len(numbers), AT_ONCE):
            self.client.log_batch(self.id, metrics=numbers[start : start + AT_ONCE])

    def log_generations(self, rows: Rows, step: int) -> None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = {"columns": columns, "data": [[row.get(key) for key in columns] for row in rows]}
        self.client.log_text(self.id, to_json(table), f"val_generations/step_{step}.json")

    def close(self) -> None:
        self.client.set_terminated(self.id)


def allowed(name: str) -> str:
    """
    >>> allowed("val-core/gsm8k/acc/mean@1"), allowed("reward/a+b/mean")
    ('val-core/gsm8k/acc/mean_at_1', 'reward/a_b/mean')
    """
    return "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in name.replace("@", "_at_"))


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a tree with its value as a text that is short enough."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield allowed(f"{prefix}{key}"), text[:LONGEST_VALUE]
