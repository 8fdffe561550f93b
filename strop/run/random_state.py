"""Every random state of a process as one tree: Python's, NumPy's, torch's on the CPU and on each CUDA device."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)


def capture() -> dict[str, Any]:
    """The global generators as they are now. Generators of your own go into the checkpoint through their `get_state()`."""
    state: Any = np.random.get_state(legacy=False)
    inner = state["state"]
    return {
        "python": random.getstate(),
        "numpy": {
            "bit_generator": state["bit_generator"],
            "key": torch.from_numpy(inner["key"].astype(np.int64)),
            "pos": int(inner["pos"]),
            "has_gauss": int(state["has_gauss"]),
            "gauss": float(state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        # Asking an unused CUDA for its state would start it.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else [],
    }


def restore(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy_state = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": numpy_state["bit_generator"],
            "state": {"key": numpy_state["key"].numpy().astype(np.uint32), "pos": numpy_state["pos"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        }
    )
    torch.set_rng_state(state["torch"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(state["cuda"]) > devices:
        log.warning(
            "The checkpoint has random states of %d CUDA devices, there are %d here: the resumed run draws other numbers.",
            len(state["cuda"]),
            devices,
        )
    for device, cuda_state in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(cuda_state, device)
