"""Models on the meta device: parameters have shape and dtype but no memory; buffers (rotary frequencies ...)
are real.

A rank builds such a module, shards it, and allocates memory for its own shards alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from strop.models.lora import base_model


@contextmanager
def meta_init() -> Iterator[None]:
    """Inside the block every new parameter of a module is moved to the meta device at once."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment] # replaced on purpose
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign] # restored


def allocate(module: nn.Module, device: torch.device, storage: torch.device | None = None) -> None:
    """Memory, not initialised, for every parameter of a module (or its shards) on the meta device.

    Buffers go to `device`, parameters there or to `storage`.
    """

    def place(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=storage or device)
        return tensor.to(device)

    module._apply(place)
    base = base_model(module)
    tie_weights = getattr(base, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()  # each name got memory of its own
