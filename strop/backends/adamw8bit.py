"""AdamW with two moments of 8 bits each (optim.optimizer=AdamW8bit): 2 instead of 8 bytes per weight.

A moment is cut into blocks of 256 numbers. A block keeps its largest magnitude in fp32; each number keeps the
logarithm of its share of it, in steps of 9 % or less, and the first moment its sign. Small numbers of a block
are thus as exact as large ones. Rounding is stochastic: a second moment changes by 0.1 % per update, far less
than a step, so rounding to the nearest code would freeze it. The random numbers follow from the number of the
update, so a resumed run computes the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer

BLOCK = 256
MIN_SIZE = 4096
"""Smaller weights keep their moments in fp32: they take no memory worth saving."""
FIRST_OCTAVES = 12.0
"""Range of the first moment within a block: 127 magnitudes between 2^-12 and 1."""
SECOND_OCTAVES = 30.0
"""Range of the second moment within a block: 255 numbers between 2^-30 and 1."""


def quantize(
    values: Tensor, octaves: float, levels: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Codes 0..`levels` of the magnitudes, and the largest magnitude of each block. Code 0 is zero; the
    others are 2^((code - levels) / levels * octaves) of the largest."""
    blocks = pad(values.flatten().abs(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.amax(1)
    share = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    place = levels + share.log2() * (levels / octaves)
    noise = torch.rand(place.shape, generator=generator, device=place.device)
    codes = (place + noise).floor().clamp(0, levels)
    return codes.flatten()[: values.numel()].to(torch.uint8), largest


def dequantize(codes: Tensor, largest: Tensor, octaves: float, levels: int) -> Tensor:
    """The magnitudes of `quantize`, flat."""
    blocks = pad(codes, (0, -codes.numel() % BLOCK)).view(-1, BLOCK)
    magnitudes = ((blocks.float() - levels) * (octaves / levels)).exp2() * largest[:, None]
    return torch.where(blocks == 0, 0.0, magnitudes).flatten()[: codes.numel()]


class AdamW8bit(Optimizer):
    """AdamW with moments in 8 bits."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        min_size: int = MIN_SIZE,
    ) -> None:
        """Weights with fewer than `min_size` numbers keep moments in fp32."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.min_size = min_size

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        number = 0
        for group in self.param_groups:
            for weight in group["params"]:
                number += 1
                if weight.grad is not None:
                    self._update(weight, group, number)

    def _update(self, weight: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[weight]
        step = int(state.get("step", 0)) + 1
        low, high = group["betas"]
        gradient = weight.grad.float().flatten()  # type: ignore[union-attr] # checked by the caller
        first, second = self._moments(state, gradient)
        first.lerp_(gradient, 1 - low)
        second.mul_(high).addcmul_(gradient, gradient, value=1 - high)
        state["step"] = torch.tensor(float(step))
        denominator = (second / (1 - high**step)).sqrt_().add_(group["eps"])
        change = (first / (1 - low**step)).div_(denominator)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(change.view_as(weight).to(weight.dtype), alpha=-group["lr"])
        if weight.numel() < self.min_size:
            state["exp_avg"] = first.view_as(weight)
            state["exp_avg_sq"] = second.view_as(weight)
            return
        generator = torch.Generator(weight.device).manual_seed(step * 1_000_003 + number)
        codes, state["first_scale"] = quantize(first, FIRST_OCTAVES, 127, generator)
        state["first"] = torch.where(first < 0, -codes.to(torch.int8), codes.to(torch.int8))
        state["second"], state["second_scale"] = quantize(second, SECOND_OCTAVES, 255, generator)

    def _moments(self, state: dict[str, Any], gradient: Tensor) -> tuple[Tensor, Tensor]:
        if "exp_avg" in state:
            return state["exp_avg"].flatten(), state["exp_avg_sq"].flatten()
        if "first" not in state:
            return torch.zeros_like(gradient), torch.zeros_like(gradient)
        signed: Tensor = state["first"]
        first = dequantize(signed.abs().to(torch.uint8), state["first_scale"], FIRST_OCTAVES, 127)
        second = dequantize(state["second"], state["second_scale"], SECOND_OCTAVES, 255)
        return torch.where(signed < 0, -first, first), second
