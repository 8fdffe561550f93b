"""Strop: RL post-training for language models.

The names in `__all__` are the public surface (docs/api.md). Each is imported when it is first used, so that
`import strop` costs nothing; `__init__.pyi` tells their types to editors and type checkers.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0.dev0"

__all__ = [
    "Chart",
    "Datum",
    "Evaluation",
    "Policy",
    "Run",
    "StepOutput",
    "Table",
    "__version__",
    "dpo",
    "evaluate",
    "generate",
    "grpo",
    "ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "reward_model",
    "rloo",
    "sft",
]

_HOMES = {
    "strop.api.algorithms": (
        *("grpo", "ppo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    ),
    "strop.api.inference": ("Evaluation", "evaluate", "generate"),
    "strop.api.run": ("Chart", "Run"),
    "strop.api.supervised": ("dpo", "reward_model", "sft"),
    "strop.api.table": ("Table",),
    "strop.policy.batches": ("Datum", "StepOutput"),
    "strop.policy.policy": ("Policy",),
}
"""Modules and the public names that they define."""


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            value: object = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'strop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
