"""Keys and values of the KV cache in 8 bits (rollout.kv_cache_dtype=fp8).

Each head of each token is a vector of e4m3 numbers times one power of two, whose exponent is a
further byte. A power of two changes no digit, so the stored numbers are exact in every 16-bit format: a
kernel that reads them computes what it would compute from a 16-bit cache with the same numbers. Attention
uses the stored numbers everywhere, in a prefill too, so that a sequence that is computed again after
preemption sees what it saw before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from strop.registry import did_you_mean
from strop.rollout.native.kv_cache import CacheTensors, TensorIndex
from strop.rollout.native.quantization.formats import FP8, FP8_CAPABILITY

AUTO = "auto"
CACHE_DTYPES = (AUTO, FP8.name)
_BIAS = 127
"""What is added to a stored exponent, as in a float32."""
_DIGITS = 23
"""Bits of a float32 after its exponent."""
_NAN = 255
"""The exponent of a vector that is NaN."""


def is_fp8(name: str, device: torch.device) -> bool:
    """Whether rollout.kv_cache_dtype asks for 8 bits, if this device can have them. A CPU can: plain torch
    reads them."""
    if name not in CACHE_DTYPES:
        raise ValueError(
            f"rollout.kv_cache_dtype={name!r} must be {' or '.join(CACHE_DTYPES)} with the native engine."
            f"{did_you_mean(name, CACHE_DTYPES)}"
        )
    if name == AUTO:
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"rollout.kv_cache_dtype=fp8 needs a GPU with compute capability 8.9 or more; "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}. Set rollout.kv_cache_dtype=auto."
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"rollout.kv_cache_dtype=fp8 needs a CUDA device or a CPU, but the model is on {device.type}. "
            "Set rollout.kv_cache_dtype=auto."
        )
    return True


def in_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., size] as e4m3 numbers, and the exponents [..., 1] of the powers of two that they are times,
    both as bytes. The power is the least with which all numbers fit. A vector with a number that is not
    finite becomes NaN: zeros times infinity. So e4m3's own NaN is never stored, and kernels ignore it."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    bits = largest.view(torch.int32)
    # The largest number is m · 2^e with 1 <= m < 2; 448 = 1.75 · 2^8.
    exponents = (bits >> _DIGITS) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    exponents = exponents.clamp(1, 254)
    finite = largest.isfinite()
    ratio = (wide * _powers(2 * _BIAS - exponents)).where(finite, 0.0)
    exponents = exponents.where(finite, _NAN)
    return ratio.to(FP8.dtype).view(torch.uint8), exponents.to(torch.uint8)


def from_8_bits(numbers: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """What in_8_bits gave, as numbers of `dtype`."""
    return numbers.view(FP8.dtype).to(dtype) * _powers(exponents.int()).to(dtype)


def _powers(exponents: Tensor) -> Tensor:
    """2^(exponent - 127) as float32, exactly."""
    return (exponents << _DIGITS).view(torch.float32)


class ShortTensors(CacheTensors):
    """Keys, values and their exponents, all as bytes."""

    def __init__(
        self, layers: Mapping[int, tuple[int, int, int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers, dtype, device)
        self.stored = torch.uint8
        self.key_exponents: dict[int, Tensor] = {}
        self.value_exponents: dict[int, Tensor] = {}

    @property
    def kinds(self) -> list[dict[int, Tensor]]:
        return [self.keys, self.values, self.key_exponents, self.value_exponents]

    def sizes(self, layer: int) -> list[int]:
        return [*super().sizes(layer), 1, 1]

    def write(
        self, layer: int, slots: tuple[Tensor, Tensor], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        place = (slots[0], slice(None), slots[1])
        stored = []
        kinds = ((self.keys, self.key_exponents, key), (self.values, self.value_exponents, value))
        for numbers, exponents, x in kinds:
            short, power = in_8_bits(x)
            numbers[layer][place] = short
            exponents[layer][place] = power
            stored.append(from_8_bits(short, power, x.dtype))
        return stored[0], stored[1]

    def read(self, layer: int, index: TensorIndex) -> tuple[Tensor, Tensor]:
        key = from_8_bits(self.keys[layer][index], self.key_exponents[layer][index], self.dtype)
        value = from_8_bits(self.values[layer][index], self.value_exponents[layer][index], self.dtype)
        return key, value

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer].view(FP8.dtype), self.values[layer].view(FP8.dtype)

    def exponents(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return self.key_exponents[layer], self.value_exponents[layer]
