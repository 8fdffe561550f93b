"""Copies of frozen weights for decode steps on a CPU. They stay when adapters are trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_SAMPLES = 512
"""Weights of a layer that are compared to see that it did not change."""

LinearForward = Callable[[Tensor], Tensor]


class FrozenLinear:
    """A frozen linear layer and the function that computes it while the engine samples."""

    def __init__(self, layer: nn.Linear, packed: Callable[[nn.Linear], LinearForward]) -> None:
        """`packed` copies the weights of a layer and returns the function that computes with the copy."""
        self.layer = layer
        self._packed = packed
        self._seen: tuple[int, int] | None = None
        self._sampled = torch.empty(0)
        self.forward: LinearForward = layer.forward

    def refresh(self) -> None:
        """Make the copy, unless it has the weights of the layer."""
        weight = self.layer.weight.detach()
        seen = (weight.data_ptr(), self.layer.weight._version)
        # Code that writes through `.data` (as peft does when it merges adapters) leaves the version as it is.
        step = max(1, weight.numel() // _SAMPLES)
        sampled = weight.reshape(-1)[::step]
        if self._seen == seen and torch.equal(sampled, self._sampled):
            return
        self.forward = self._packed(self.layer)
        self._seen = seen
        self._sampled = sampled.clone()
