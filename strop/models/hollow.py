"""Modules without weights: parameters have shape and dtype but no memory, buffers (rotary frequencies ...) are real.

A rank makes such a module, takes the shards it is responsible for, and gives memory to those alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def hollow() -> Iterator[None]:
    """Inside the block every parameter that a module gets loses its memory at once."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def give_memory(module: Any, device: torch.device, rest: torch.device | None = None) -> None:
    """Memory for every hollow parameter of a module (or for its shards); what is in it is left to chance.

    Buffers go to `device`, parameters there or to `rest`.
    """

    def place(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=rest or device) if tensor.is_meta else tensor.to(device)

    module._apply(place)
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    if hasattr(base, "tie_weights"):
        base.tie_weights()  # each name got memory of its own
