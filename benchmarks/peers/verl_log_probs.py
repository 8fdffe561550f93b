"""verl reports how far the probabilities of sampler and trainer differ; this adds the log-probs.

Loaded by verl itself in each of its processes: VERL_USE_EXTERNAL_MODULES=verl_log_probs.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

NAME = "verl.utils.debug.metrics"


def differences(data: Any) -> dict[str, float]:
    mask = data.batch["response_mask"].bool()
    apart = (data.batch["old_log_probs"] - data.batch["rollout_log_probs"]).abs()[mask]
    return {
        "training/rollout_log_probs_diff_mean": apart.mean().item(),
        "training/rollout_log_probs_diff_max": apart.max().item(),
    }


class AfterImport:
    """Changes the module when verl imports it: importing it from here would be a cycle."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != NAME:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            theirs = module.calculate_debug_metrics
            module.calculate_debug_metrics = lambda data: {**theirs(data), **differences(data)}

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterImport())  # type: ignore[arg-type]
