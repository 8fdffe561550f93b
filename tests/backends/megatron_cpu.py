"""megatron-core on a machine without CUDA: the few places where it asks for a CUDA device answer with the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CudaToCpu(TorchFunctionMode):
    """Tensors made with device="cuda" are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return function(*args, **kwargs)


@functools.cache
def without_cuda() -> None:
    """Patch megatron-core and torch for the rest of this process."""
    if torch.cuda.is_available():
        return
    import megatron.core.tensor_parallel.random as random

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.Stream = lambda *_, **__: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.Tensor.cuda = lambda self, *_, **__: self
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    _CudaToCpu().__enter__()
