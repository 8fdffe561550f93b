"""Stands in for SGLang's kernels, which have no CPU build on PyPI. What its plain torch paths need does nothing here; whatever else
is called says its name."""

from typing import Any

import torch

__version__ = "0.0.stub"
_ops = torch.library.Library("sgl_kernel", "DEF")
_ops.define("init_cpu_threads_env(str cores) -> str")
_ops.impl("init_cpu_threads_env", lambda cores: cores, "CompositeExplicitAutograd")
_ops.define("initialize(int size, int rank) -> ()")
_ops.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
