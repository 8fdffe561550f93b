"""Devices: memory, arithmetic rate and bandwidth of each, and constants that no configuration contains.

The constants say how much memory libraries take for themselves, and which share of the peak rates is reached.
Each has its reason next to it. Memory is in bytes, rates are per second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from strop.registry import did_you_mean

GIB = 2**30
MIB = 2**20

# --- memory -------------------------------------------------------------------------------------------------

CONTEXT = int(0.8 * GIB)
"""CUDA context and kernels, outside of torch's allocator: 0.75 to 0.81 GiB measured on an
H200."""
SLACK = GIB
"""Memory that torch's allocator keeps after passes have freed it: 0.1 to 1.8 GiB measured on an H200, CUDA
graphs not counted."""
WORKSPACE = 64 * MIB
"""cuBLAS' workspaces, which torch's allocator counts as its own."""
FRAGMENTATION = 1.1
"""Memory that torch reserves in relation to the peak of a pass, because freed blocks do not fit later
allocations."""
SAFE = 0.97
"""Share of a device's memory that a plan may use."""
LOGITS = 2**28
"""Logits that exist at a time on a GPU (models/forward.py), each in float32."""
ENGINE_SAFE = 0.9
"""Share of the free memory that the native engine takes for its KV cache (rollout/native/memory.py)."""
HOST_SHARE = 4
"""On a CPU the cache takes at most this fraction of the host's memory (rollout/native/memory.py)."""
RESTING_SHARE = 4
"""The KV cache stays while the models learn if at most one part in this number of the device is used with it
(rollout/native/memory.py)."""
CACHE_BLOCK = 64
"""Capacities of the cache are multiples of it (rollout/native/scheduler.py)."""
SLEEPING_ENGINE = int(1.5 * GIB)
"""Memory that vLLM keeps on the device while it sleeps: its context and CUDA graphs."""
ROW_BYTES = 12
"""Token id and log-prob of each slot of the native engine's cache (rollout/native/rows.py)."""
LOSS_BYTES = 64
"""float32 numbers per response token that the losses keep for the backward pass."""

# --- time ---------------------------------------------------------------------------------------------------

PRODUCT_EFFICIENCY = 0.65
"""Share of a device's rate that the matrix products of a training pass reach."""
KEPT_TRAFFIC = 9
"""How often a forward pass moves the activations of its layers: norms, rotary embeddings, gates and sums are
separate operations. With the share above it gives the update measured on one H200 (0.5B, 16,384 tokens,
0.36 s), and 42% of its rate at 7B."""
LOGIT_TRAFFIC = 5
"""How often a forward pass moves the logits of its responses."""
PREFILL_EFFICIENCY = 0.45
"""Share of a device's rate that an engine reaches in prefill."""
BANDWIDTH = 0.9
"""Share of the memory bandwidth that is reached."""
DECODE_EFFICIENCY = 0.75
"""Share of the peak that matrix products of decode steps reach."""
DECODE_LAUNCH = 45e-6
"""Seconds per layer and decode step for small kernels, for any number of rows. With the two above it gives
the rates measured on one H200 (0.5B 227k, 1.5B 107k, 7B 34.8k tokens per second with 1,024 rows) within
15%."""
SUM_LATENCY = 15e-6
"""Latency in seconds of an all-reduce with tensor parallelism, twice per layer."""
ANSWER_SHARE = 0.6
"""Mean length of a response as a share of its limit."""
NODE_LINK = 40e9
"""Bytes per second and device between machines (400 Gbit/s, as collectives see it)."""
HOST_LINK = 25e9
"""Bytes per second between a device and host memory."""
HOST_MEMORY = 20e9
"""Bytes per second of host memory that the optimizer of one rank gets."""
DISK = 2e9
"""Bytes per second that one machine writes to its disk."""


# --- devices ------------------------------------------------------------------------------------------------
# Memory and bandwidth are those of the data sheets.


@dataclass(frozen=True)
class Device:
    """What one device offers."""

    name: str
    memory: int
    """Bytes that a process can use."""
    flops: float
    """Operations per second that a large bf16 matrix product reaches (fp32 on a CPU): 788e12 measured on an
    H200, four fifths of the data sheet; the same share is assumed for the other devices."""
    bandwidth: float
    """Bytes per second between memory and processor."""
    link: float
    """Bytes per second to the other devices of its machine, each way."""
    is_cpu: bool = False


@dataclass(frozen=True)
class PlannedCluster:
    """Machines with equal devices."""

    device: Device
    nodes: int = 1
    per_node: int = 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


_DEVICES = (
    Device("h200", int(139.8 * GIB), 788e12, 4.8e12, 350e9),
    Device("h100", int(79.1 * GIB), 788e12, 3.35e12, 350e9),
    Device("a100-80", int(79.1 * GIB), 250e12, 2.0e12, 230e9),
    Device("a100-40", int(39.4 * GIB), 250e12, 1.55e12, 230e9),
    Device("l40s", int(44.4 * GIB), 290e12, 0.86e12, 25e9),
    Device("4090", int(23.5 * GIB), 132e12, 1.0e12, 20e9),
    Device("cpu", 16 * GIB, 0.5e12, 0.05e12, 10e9, is_cpu=True),
)
DEVICES = {device.name: device for device in _DEVICES}
OTHER = "h100"
"""The device whose rates are assumed if only the memory is known."""

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
            f"--gpu {name}: no such device.{did_you_mean(name.lower(), DEVICES)} Known: "
            f"{', '.join(DEVICES)}; or give its memory, such as 80GiB."
        )
    unit = 1
    if size[2]:
        unit = _UNITS[size[2].lower()]
    memory = int(float(size[1]) * unit)
    if memory < GIB:
        raise ValueError(f"--gpu {name} is {memory} bytes of memory; give a unit, such as {size[1]}GiB.")
    like = DEVICES[OTHER]
    return Device(f"{memory / GIB:.0f} GiB", memory, like.flops, like.bandwidth, like.link)
