"""Weights for a hollow, sharded module. No rank ever holds all of them in the precision they are trained in.

Where the folder's safetensors files name the weights as the module does, every rank reads its own slices and nothing else. In
all other cases (GGUF, fused experts, new heads, adapters) rank 0 loads the model as one process would, in the precision of the
files, and deals it out one weight at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.backends.sharded import Region, fill
from strop.models.hollow import give_memory
from strop.models.load import Source
from strop.models.weight_files import open_weights, weight_files
from strop.ranks import Ranks


class Slices:
    """One tensor of a safetensors file, of which any region can be read."""

    def __init__(self, opened: Any, name: str):
        self._view = opened.get_slice(name)
        self.shape = tuple(self._view.get_shape())

    def read(self, region: Region | None = None) -> Tensor:
        found: Tensor = self._view[region if region else (slice(None),) * len(self.shape)]
        return found


def saved_slices(folder: Path) -> dict[str, Slices]:
    """Every tensor in the safetensors files of a model folder, by name; empty where there are none."""
    found: dict[str, Slices] = {}
    for file in weight_files(folder):
        opened = open_weights(folder / file)
        found |= {name: Slices(opened, name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return found


def loader(
    source: Source, load_whole: Callable[[], Any], ranks: Ranks, device: torch.device, *, new: bool, rest: torch.device
) -> Callable[[Any], None]:
    """What brings weights into a module that was made hollow; `load_whole` makes the same module with all of its weights, and
    `new` says that some of them are in no file. Shards are kept on `rest`, buffers on `device`."""

    def bring(module: Any) -> None:
        give_memory(module, device, rest)
        weights = dict(module.named_parameters())
        saved = {} if new or source.gguf_file else ranks.together(lambda: saved_slices(Path(source.name)), "reading the model")
        own = {name: tuple(weight.shape) for name, weight in weights.items()}
        fits = bool(saved) and all(name in saved and saved[name].shape == shape for name, shape in own.items())
        if all(ranks.gather(fits)):
            ranks.together(lambda: _fill(weights, saved), "reading the model's weights")
            return
        whole = ranks.together(lambda: load_whole() if ranks.lead else None, "loading the model")
        deal_out(weights, None if whole is None else dict(whole.named_parameters()), device)

    return bring


def _fill(weights: Mapping[str, Tensor], saved: Mapping[str, Slices]) -> None:
    for name, weight in weights.items():
        fill(weight, saved[name])


@torch.no_grad()
def deal_out(weights: Mapping[str, Tensor], whole: Mapping[str, Tensor] | None, device: torch.device) -> None:
    """Every rank keeps its piece of what rank 0 has; one weight is under way at a time."""
    for name, weight in weights.items():
        box: list[Any] = [None if whole is None else whole[name].dtype]
        dist.broadcast_object_list(box, src=0)
        whole_one = torch.empty(weight.shape, dtype=box[0]) if whole is None else whole[name].detach().contiguous()
        whole_one = whole_one.to(device)
        dist.broadcast(whole_one, src=0)
        fill(weight, whole_one)
