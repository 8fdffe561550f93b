"""How much memory the cache may take."""

from __future__ import annotations

import os
from typing import Any

import torch

_SAFE = 0.9
_HOST_SHARE = 4
_RESTING_SHARE = 4


def cache_memory(model: Any, device: torch.device, share: float, held: int = 0) -> int:
    """Bytes for the cache beside weights that together may take `share` of the device; on a CPU, a quarter of the host. `held`:
    what it has already."""
    if device.type != "cuda":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _HOST_SHARE
    free, total = torch.cuda.mem_get_info(device)
    # What torch holds and does not use is free for us too.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) + held
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return max(0, int(min(free * _SAFE, total * share - weights)))


def may_stay(device: torch.device) -> bool:
    """Whether the cache may stay while the models learn: with it, at most a quarter of the device is taken."""
    return device.type == "cuda" and torch.cuda.memory_allocated(device) * _RESTING_SHARE <= torch.cuda.mem_get_info(device)[1]
