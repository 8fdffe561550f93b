"""Refusing tensors that do not belong together, before broadcasting hides the mistake."""

from __future__ import annotations

from torch import Tensor


def require_same_shape(**tensors: Tensor | None) -> None:
    """All given tensors have one shape; a None is an argument that was left out."""
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    first, shape = next(iter(given.items()))
    for name, other in given.items():
        if other != shape:
            raise ValueError(f"{name} has shape {other} but {first} has shape {shape}; they must be equal.")
