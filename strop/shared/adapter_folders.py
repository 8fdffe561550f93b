"""Folders of peft adapters as weights of a backend."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from strop.backends.single import ModuleBackend
from strop.run.checkpoint.tensor_files import read_tensors


def read_sampling_folder(path: Path) -> tuple[int, float, dict[str, Tensor]]:
    """Rank, alpha (its scale is alpha / rank) and weights of an adapter in a folder of peft."""
    rank, alpha = read_adapter_size(path)
    file = path / "adapter_model.safetensors"
    try:
        weights = read_tensors(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {str(error)[:200]}") from error
    for name, weight in weights.items():
        if ".lora_A" in name and len(weight) != rank:
            raise ValueError(
                f"{path} holds files of different adapters: adapter_config.json says r={rank}, and {name} "
                f"has rank {len(weight)}."
            )
    return rank, alpha, weights


def read_adapter_size(path: Path) -> tuple[int, float]:
    """Rank and alpha of an adapter in a folder of peft. With use_rslora the alpha that gives its scale."""
    file = path / "adapter_config.json"
    if not file.is_file():
        raise ValueError(f"{path} holds no adapter: there is no adapter_config.json in it.")
    try:
        settings = json.loads(file.read_text())
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        patterns = [key for key in ("rank_pattern", "alpha_pattern") if settings.get(key)]
        rank_stabilised = bool(settings.get("use_rslora"))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read as that of a LoRA adapter ({type(error).__name__}: {str(error)[:200]})."
        ) from error
    if rank < 1:
        raise ValueError(f"{file} says r={rank}; the rank of an adapter is at least 1.")
    if patterns:
        raise ValueError(
            f"{file} sets {' and '.join(patterns)}: with several adapters, each must have one rank and one "
            "scale."
        )
    return rank, alpha * math.sqrt(rank) if rank_stabilised else alpha


def load_weights(weights: Mapping[str, Tensor], backend: ModuleBackend) -> None:
    """Load weights alone, by their names in the backend; the optimizer forgets what it has seen."""
    backend.load_state_dict({"model": weights})
    backend.weights.clear_gradients()
    if backend.optimizer is not None:
        backend.optimizer.state.clear()
