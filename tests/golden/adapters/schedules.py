"""verl's learning-rate schedules."""

from __future__ import annotations

from typing import Any

from strop.backends import optimizer as schedules
from tests.golden.harness import Case, adapts, peer

VERL = "verl.utils.torch_functional."


@adapts(*(VERL + f"get_{name}_schedule_with_warmup" for name in ("constant", "cosine", "wsd")))
def schedule(case: Case) -> dict[str, Any]:
    factor = getattr(schedules, case.function.rpartition(".")[2].split("_")[1])
    args = dict(case.kwargs["args"])
    shift = 0 if args.pop("zero_indexed_step", True) else 1
    names = {
        "num_warmup_steps": "warmup_steps",
        "num_training_steps": "total_steps",
        "min_lr_ratio": "min_ratio",
        "init_lr_ratio": "init_ratio",
        "stable_ratio": "stable_ratio",
        "num_cycles": "num_cycles",
    }
    ours = {names[key]: value for key, value in args.items()}
    return {
        "lr": [
            factor(step + shift, compat=peer("verl", None), **ours) for step in range(case.kwargs["steps"])
        ]
    }
