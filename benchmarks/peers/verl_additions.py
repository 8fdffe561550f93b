"""Two changes to verl, which loads them in each process: VERL_USE_EXTERNAL_MODULES=verl_additions.

verl reports how far the probabilities of sampler and trainer differ: the differences of log-probs are added.
With PEERS_WITHOUT_IPC=1, weights go to the engine through shared memory (verl's own second way), for machines
whose kernel has no CUDA IPC.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def differences(data: Any) -> dict[str, float]:
    mask = data.batch["response_mask"].bool()
    apart = (data.batch["old_log_probs"] - data.batch["rollout_log_probs"]).abs()[mask]
    return {
        "training/rollout_log_probs_diff_mean": apart.mean().item(),
        "training/rollout_log_probs_diff_max": apart.max().item(),
    }


def add_differences(module: Any) -> None:
    theirs = module.calculate_debug_metrics
    module.calculate_debug_metrics = lambda data: {**theirs(data), **differences(data)}


def use_shared_memory(module: Any) -> None:
    module.PlatformCUDA.is_ipc_supported = lambda self: False


CHANGES: dict[str, Callable[[Any], None]] = {"verl.utils.debug.metrics": add_differences}
if os.environ.get("PEERS_WITHOUT_IPC") == "1":
    CHANGES["verl.plugin.platform.platform_cuda"] = use_shared_memory


class AfterImport:
    """Changes a module when verl imports it: importing it from here would be a cycle."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name = name
        self.change = change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


for module_name, its_change in CHANGES.items():
    if module_name in sys.modules:
        its_change(sys.modules[module_name])
    else:
        sys.meta_path.insert(0, AfterImport(module_name, its_change))  # type: ignore[arg-type]
