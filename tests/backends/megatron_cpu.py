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


class _NoStream:
    """A CUDA stream where there is none: everything is in order already."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def record_event(self) -> _NoStream:
        return self


_no_stream = _NoStream()


@functools.cache
def without_cuda() -> None:
    """Patch megatron-core and torch for the rest of this process."""
    if torch.cuda.is_available():
        return
    import megatron.core.tensor_parallel.random as random

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.Stream = lambda *_, **__: _no_stream
    torch.cuda.current_stream = lambda *_: _no_stream
    torch.cuda.manual_seed = torch.manual_seed
    torch.Tensor.cuda = lambda self, *_, **__: self
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    _CudaToCpu().__enter__()
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def as_on_a_gpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = as_on_a_gpu
