"""Copies of frozen weights for decode steps on a CPU. They stay when adapters are trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_SAMPLES = 512
"""Weights of a layer that are compared to see that it did not change."""

LinearForward = Callable[[Tensor], Tensor]


class SeenWeight:
    """What a frozen weight was when it was copied."""

    def __init__(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._sampled = torch.empty(0)

    def is_unchanged(self, weight: Tensor) -> bool:
        return self._identity == _identity(weight) and torch.equal(_sampled(weight), self._sampled)

    def remember(self, weight: Tensor) -> None:
        self._identity = _identity(weight)
        self._sampled = _sampled(weight).clone()


def _identity(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def _sampled(weight: Tensor) -> Tensor:
    """Code that writes through `.data` (as peft does when it merges adapters) leaves the version as it is."""
    step = max(1, weight.numel() // _SAMPLES)
    return weight.detach().reshape(-1)[::step]


class FrozenLinear:
    """A frozen linear layer and the function that computes it while the engine samples."""

    def __init__(self, layer: nn.Linear, packed: Callable[[nn.Linear], LinearForward]) -> None:
        """`packed` copies the weights of a layer and returns the function that computes with the copy."""
        self.layer = layer
        self._packed = packed
        self._seen = SeenWeight()
        self.forward: LinearForward = layer.forward

    def refresh(self) -> None:
        """Make the copy, unless it has the weights of the layer."""
        if not self._seen.is_unchanged(self.layer.weight):
            self.forward = self._packed(self.layer)
            self._seen.remember(self.layer.weight)
