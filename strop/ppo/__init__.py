"""Reinforcement learning: the loop, and what builds it.

`strop.ppo` is also a public function (docs/api.md). The import system puts this package under that name, so
the package can be called like the function.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


class CallablePackage(ModuleType):
    """A package that is called like the public function of its name."""

    def __call__(self, *arguments: object, **keys: object) -> object:
        """Train with PPO."""
        return importlib.import_module("strop.api.algorithms").ppo(*arguments, **keys)


sys.modules[__name__].__class__ = CallablePackage
