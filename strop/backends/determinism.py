"""The same bits from run to run on one device."""

from __future__ import annotations

import os

import torch

WORKSPACE = ":4096:8"
"""Fixed buffers of cuBLAS: with several streams it otherwise adds in whatever order they come free."""


def use_deterministic_kernels() -> None:
    """For everything that this process computes. An operation of which torch has no such kernel is named in a warning: what
    samples needs some (a running sum on a GPU), and sampled tokens do not depend on the last bit of it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
