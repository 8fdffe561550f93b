"""Initial weights from a Hugging Face folder: every rank reads its own part of each weight.

Where the files name the weights as the module does, no rank reads more than it keeps. In all other cases
(GGUF, experts that are stored one by one, new heads) rank 0 loads the model as one process would and
broadcasts it, one weight at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strop.backends.fsdp.shard import SavedSlices, saved_slices
from strop.backends.fsdp.sharded import RegionReader, fill
from strop.models.load import WeightFiles
from strop.ranks import Ranks


def part_loader(
    source: WeightFiles,
    load_whole: Callable[[], nn.Module],
    ranks: Ranks,
    device: torch.device,
    *,
    new: bool,
) -> Callable[[Mapping[str, Tensor], Mapping[str, torch.Size]], None]:
    """A function that fills this rank's weights, given the whole shapes of all. `load_whole` makes the module
    with all weights; `new`: some of them are in no file."""

    def load(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
        saved: dict[str, SavedSlices] = {}
        if not new and not source.gguf_file:
            saved = ranks.run_or_raise_on_all(lambda: saved_slices(Path(source.name)), "reading the model")
        if all(ranks.all_gather_object(_fits(shapes, saved))):
            ranks.run_or_raise_on_all(lambda: _fill(weights, saved), "reading the model's weights")
            return
        whole = ranks.run_or_raise_on_all(
            lambda: load_whole() if ranks.is_rank0 else None, "loading the model"
        )
        found = None if whole is None else dict(whole.named_parameters())
        broadcast_parts(weights, shapes, found, ranks, device)

    return load


def checkpoint_loader(
    open_weights: Callable[[Mapping[str, torch.Size]], Mapping[str, RegionReader]], ranks: Ranks
) -> Callable[[Mapping[str, Tensor], Mapping[str, torch.Size]], None]:
    """The same for another kind of checkpoint: `open_weights` finds all weights in it, given their shapes."""

    def load(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
        what = "reading the Megatron checkpoint (megatron.dist_checkpointing_path)"
        saved = ranks.run_or_raise_on_all(lambda: open_weights(shapes), what)
        ranks.run_or_raise_on_all(lambda: _fill(weights, saved), what)

    return load


def _fits(shapes: Mapping[str, torch.Size], saved: Mapping[str, SavedSlices]) -> bool:
    """Whether every weight is in the files, with its shape."""
    return all(name in saved and saved[name].shape == tuple(shape) for name, shape in shapes.items())


def _fill(weights: Mapping[str, Tensor], saved: Mapping[str, RegionReader]) -> None:
    for name, weight in weights.items():
        fill(weight, saved[name])


@torch.no_grad()
def broadcast_parts(
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    whole: Mapping[str, Tensor] | None,
    ranks: Ranks,
    device: torch.device,
) -> None:
    """Every rank keeps its part of the weights of rank 0 (`whole`), which are sent one at a time."""
    dtypes = ranks.broadcast_object({name: weight.dtype for name, weight in (whole or {}).items()})
    for name, shape in shapes.items():
        if whole is None:
            sent = torch.empty(shape, dtype=dtypes[name])
        else:
            sent = whole[name].detach().contiguous()
        sent = sent.to(device)
        if ranks.world > 1:
            dist.broadcast(sent, src=0)
        if name in weights:
            fill(weights[name], sent)


def to_meta(module: nn.Module) -> None:
    """Parameters keep their shapes and lose their memory. Buffers stay."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                part._parameters[name] = made.setdefault(id(parameter), empty)
