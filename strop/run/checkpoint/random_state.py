"""All random states of a process as one tree: Python's, NumPy's, torch's on the CPU and on each CUDA
device."""

from __future__ import annotations

import logging
import random

import numpy as np
import torch

from strop.run.checkpoint.tensor_files import Tree

log = logging.getLogger(__name__)


def capture() -> dict[str, Tree]:
    """The states of the global generators. Other generators are saved through their `get_state()`."""
    state = np.random.get_state(legacy=False)
    inner = state["state"]
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # a query would initialize an unused CUDA
        cuda = torch.cuda.get_rng_state_all()
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
        "cuda": cuda,
    }


def restore(state: dict[str, Tree]) -> None:
    """Set the global generators to what `capture` returned."""
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
            "The checkpoint has random states of %d CUDA devices, there are %d here: the resumed run draws "
            "other numbers.",
            len(state["cuda"]),
            devices,
        )
    for device, cuda_state in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(cuda_state, device)
