"""What a device offers: memory, arithmetic, bandwidths. Memory and bandwidth are those of the makers' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from strop.planning.assumptions import GIB
from strop.registry import did_you_mean


@dataclass(frozen=True)
class Device:
    name: str
    memory: int
    """Bytes that a process can use."""
    flops: float
    """Operations per second that a large bf16 product reaches (fp32 on a CPU): 788e12 measured on an H200, four fifths of the
    data sheet; the same share is taken for the others."""
    bandwidth: float
    """Bytes per second between memory and processor."""
    link: float
    """Bytes per second to the other devices of its machine, each way."""
    is_cpu: bool = False


@dataclass(frozen=True)
class Cluster:
    device: Device
    nodes: int = 1
    per_node: int = 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


DEVICES = {
    device.name: device
    for device in (
        Device("h200", int(139.8 * GIB), 788e12, 4.8e12, 350e9),
        Device("h100", int(79.1 * GIB), 788e12, 3.35e12, 350e9),
        Device("a100-80", int(79.1 * GIB), 250e12, 2.0e12, 230e9),
        Device("a100-40", int(39.4 * GIB), 250e12, 1.55e12, 230e9),
        Device("l40s", int(44.4 * GIB), 290e12, 0.86e12, 25e9),
        Device("4090", int(23.5 * GIB), 132e12, 1.0e12, 20e9),
        Device("cpu", 16 * GIB, 0.5e12, 0.05e12, 10e9, is_cpu=True),
    )
}
OTHER = "h100"
"""Whose rates are assumed for a device of which only the memory is known."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|g|mib|mb|m)?", re.IGNORECASE)
_UNITS = {"gib": GIB, "g": GIB, "gb": 10**9, "mib": 2**20, "m": 2**20, "mb": 10**6}


def device_of(name: str) -> Device:
    """A device by name, or by its memory: `80GiB`, `24gb`, a number of bytes."""
    known = DEVICES.get(name.strip().lower())
    if known is not None:
        return known
    size = _SIZE.fullmatch(name.strip())
    if size is None:
        raise ValueError(
            f"--gpu {name}: no such device.{did_you_mean(name.lower(), DEVICES)} Known: {', '.join(DEVICES)}; or give its "
            "memory, such as 80GiB."
        )
    number, unit = float(size[1]), size[2]
    memory = int(number * (_UNITS[unit.lower()] if unit else 1))
    if memory < GIB:
        raise ValueError(f"--gpu {name} is {memory} bytes of memory; give a unit, such as {size[1]}GiB.")
    like = DEVICES[OTHER]
    return Device(f"{memory / GIB:.0f} GiB", memory, like.flops, like.bandwidth, like.link)
