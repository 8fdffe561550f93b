"""Keys and values of the KV cache: in the precision of the model, or in 8 bits (rollout.kv_cache_dtype=fp8).

In 8 bits, each head of each token is a vector of e4m3 numbers times one power of two, whose exponent is a
further byte. A power of two changes no digit, so the stored numbers are exact in every 16-bit format: a
kernel that reads them computes what it would compute from a 16-bit cache with the same numbers. Attention
uses the stored numbers everywhere, in a prefill too, so that a sequence that is computed again after
preemption sees what it saw before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from strop.registry import did_you_mean
from strop.rollout.native.quantization.formats import FP8, FP8_CAPABILITY

AUTO = "auto"
CACHE_DTYPES = (AUTO, FP8.name)
_BIAS = 127
"""What is added to a stored exponent, as in a float32."""
_DIGITS = 23
"""Bits of a float32 after its exponent."""

Index = Tensor | slice | tuple[Tensor | slice, ...]


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
    both as bytes. The power is the least with which all numbers fit. What is not finite becomes NaN."""
    wide = x.float()
    bits = wide.abs().amax(-1, keepdim=True).view(torch.int32)
    # The largest number is m · 2^e with 1 <= m < 2; 448 = 1.75 · 2^8.
    exponents = (bits >> _DIGITS) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    exponents = exponents.clamp(1, 254)
    ratio = wide * _powers(2 * _BIAS - exponents)
    ratio = ratio.where(ratio.abs() <= FP8.largest, torch.nan)
    return ratio.to(FP8.dtype).view(torch.uint8), exponents.to(torch.uint8)


def from_8_bits(numbers: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """What in_8_bits gave, as numbers of `dtype`."""
    return numbers.view(FP8.dtype).to(dtype) * _powers(exponents.int()).to(dtype)


def _powers(exponents: Tensor) -> Tensor:
    """2^(exponent - 127) as float32, exactly."""
    return (exponents << _DIGITS).view(torch.float32)


class CacheTensors:
    """Of each layer keys and values [places, heads, positions, size]; a place is a row or a page."""

    def __init__(
        self,
        layers: Mapping[int, tuple[int, int, int]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool,
    ) -> None:
        """`layers`: by layer, the number of key heads, the size of a key and the size of a value."""
        self.layers = dict(layers)
        self.dtype = dtype
        """Precision of what is written and read."""
        self.device = device
        self.fp8 = fp8
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.key_exponents: dict[int, Tensor] = {}
        self.value_exponents: dict[int, Tensor] = {}

    @property
    def all(self) -> list[Tensor]:
        kinds = (self.keys, self.values, self.key_exponents, self.value_exponents)
        return [tensor for tensors in kinds for tensor in tensors.values()]

    @property
    def bytes_per_token(self) -> int:
        numbers = sum(heads * (key + value) for heads, key, value in self.layers.values())
        if self.fp8:
            numbers += 2 * sum(heads for heads, _, _ in self.layers.values())
            return max(1, numbers)
        return max(1, numbers * self.dtype.itemsize)

    def resize(self, places: int, positions: int, keep: int) -> None:
        """Have so many places; the first `keep` keep their contents."""
        dtype = torch.uint8 if self.fp8 else self.dtype
        for layer, (heads, key, value) in self.layers.items():
            parts = [(self.keys, key), (self.values, value)]
            if self.fp8:
                parts += [(self.key_exponents, 1), (self.value_exponents, 1)]
            for tensors, size in parts:
                old = tensors.pop(layer, None)
                if old is not None and keep == 0:
                    old = None  # freed before the new tensor is allocated
                # zeros, not empty: a masked position has weight 0, and 0 times NaN is NaN.
                new = torch.zeros(places, heads, positions, size, dtype=dtype, device=self.device)
                if old is not None:
                    length = min(positions, old.shape[2])
                    new[:keep, :, :length] = old[:keep, :, :length]
                tensors[layer] = new

    def free(self) -> None:
        self.keys = {}
        self.values = {}
        self.key_exponents = {}
        self.value_exponents = {}

    def write(
        self, layer: int, slots: tuple[Tensor, Tensor], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [N, heads, size], entry i to its slot, and return them as they are stored."""
        place = (slots[0], slice(None), slots[1])
        if not self.fp8:
            self.keys[layer][place] = key.to(self.dtype)
            self.values[layer][place] = value.to(self.dtype)
            return key, value
        stored = []
        kinds = ((self.keys, self.key_exponents, key), (self.values, self.value_exponents, value))
        for numbers, exponents, x in kinds:
            short, power = in_8_bits(x)
            numbers[layer][place] = short
            exponents[layer][place] = power
            stored.append(from_8_bits(short, power, x.dtype))
        return stored[0], stored[1]

    def read(self, layer: int, index: Index) -> tuple[Tensor, Tensor]:
        """A part of the keys and values; in 16 bits or more, a view if `index` has slices alone."""
        if not self.fp8:
            return self.keys[layer][index], self.values[layer][index]
        key = from_8_bits(self.keys[layer][index], self.key_exponents[layer][index], self.dtype)
        value = from_8_bits(self.values[layer][index], self.value_exponents[layer][index], self.dtype)
        return key, value

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values as they are stored, for kernels."""
        if self.fp8:
            return self.keys[layer].view(FP8.dtype), self.values[layer].view(FP8.dtype)
        return self.keys[layer], self.values[layer]

    def exponents(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Those of `whole` in 8 bits."""
        if self.fp8:
            return self.key_exponents[layer], self.value_exponents[layer]
        return None

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of places, all at once."""
        for tensor in self.all:
            tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, places: Sequence[int]) -> None:
        """Set these places to 0."""
        for tensor in self.all:
            tensor[list(places)] = 0
