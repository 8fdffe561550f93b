"""Read verl's FSDP checkpoints without running code from them: one pickle of tensor shards per rank.

    actor/model_world_size_4_rank_0.pt ...    a DTensor of every parameter, with the local shard of that rank
    actor/fsdp_config.json                    {"FSDP_version": 2, "world_size": 4}
    actor/huggingface/                        config and tokenizer
    actor/lora_adapter/adapter_config.json    with LoRA

A pickle can call any function by name. This reader accepts tensors, plain containers and the classes of
torch.distributed that describe shards. Those are read as plain objects with attributes, so that the version
of torch that wrote them does not matter. Any other name is an error.
"""

from __future__ import annotations

import collections
import json
import pickle
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_ALLOWED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch.serialization", "_get_layout"): lambda name: name,
}


class PickledObject:
    """An object of torch.distributed: its attributes without its methods."""

    def __init__(self, *arguments: object, **attributes: object):
        self.arguments = arguments
        self.__dict__.update(attributes)

    def __setstate__(self, state: object) -> None:
        states = state if isinstance(state, tuple) else (state,)
        for values in states:
            if isinstance(values, dict):
                self.__dict__.update(values)


class VerlShard(PickledObject):
    """One rank's shard of a tensor."""

    shape: tuple[int, ...]
    """Of the full tensor."""

    @property
    def local(self) -> Tensor:
        return self.__dict__["_local_tensor"]

    @property
    def placements(self) -> tuple[PickledObject, ...]:
        return tuple(self.__dict__["_spec"].placements)


Shard: TypeAlias = "Tensor | VerlShard"
"""A weight as a file holds it: replicated on every rank, or the shard of one rank."""


def is_verl_checkpoint(folder: Path) -> bool:
    """Whether the folder holds weights in verl's FSDP format."""
    return folder.is_dir() and any(_FILE.fullmatch(file.name) for file in folder.iterdir())


def read_shards(folder: Path) -> dict[str, Tensor]:
    """The full weights of a checkpoint folder such as global_step_20/actor."""
    files = _rank_files(folder)
    ranks = [_load(file) for file in files]
    names = list(ranks[0])
    for file, shards in zip(files, ranks):
        if list(shards) != names:
            odd = sorted(set(names) ^ set(shards))[:3]
            raise ValueError(
                f"{file} holds other weights than {files[0].name}; only one of them has {', '.join(odd)}."
            )
    weights: dict[str, Tensor] = {}
    for name in names:
        weights[name] = _concatenate(name, [shards.pop(name) for shards in ranks])
    return weights


def _rank_files(folder: Path) -> list[Path]:
    """The file of each rank, in order."""
    found: dict[int, dict[int, Path]] = {}
    for file in folder.iterdir():
        match = _FILE.fullmatch(file.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = file
    world = max(found)
    fsdp_config = folder / "fsdp_config.json"
    if fsdp_config.is_file():
        world = int(json.loads(fsdp_config.read_text())["world_size"])
    ranks = found.get(world, {})
    missing = sorted(set(range(world)) - set(ranks))
    if missing:
        raise ValueError(
            f"{folder} is a checkpoint of {world} ranks, but model_world_size_{world}_rank_{missing[0]}.pt "
            f"is missing ({len(missing)} files in all). Copy the files of every machine into one folder."
        )
    return [ranks[rank] for rank in range(world)]


def _concatenate(name: str, shards: Sequence[Shard]) -> Tensor:
    """The full tensor from the shards of all ranks."""
    first = shards[0]
    if isinstance(first, Tensor):
        return _replicated(name, first, shards)
    placement = _shard_placement(name, first)
    if _is(placement, "Replicate"):
        return first.local.clone()
    dimension = _dimension(placement)
    full_size = first.shape[dimension]
    parts: list[Tensor] = []
    size = 0
    for shard in shards:
        if size < full_size:
            assert isinstance(shard, VerlShard)
            parts.append(shard.local)
            size += shard.local.shape[dimension]
    whole = torch.cat(parts, dim=dimension)
    if tuple(whole.shape) != tuple(first.shape):
        raise ValueError(
            f"The pieces of {name} make a tensor of shape {tuple(whole.shape)}, but {tuple(first.shape)} was "
            "saved. Are the files of one step and one run?"
        )
    return whole


def _replicated(name: str, first: Tensor, copies: Sequence[Shard]) -> Tensor:
    """A tensor that every rank saved in full; all copies must be equal."""
    for copy in copies[1:]:
        assert isinstance(copy, Tensor)
        if not torch.equal(first, copy):
            raise ValueError(
                f"{name} is a plain tensor that differs between ranks, so nothing says how to put it "
                "together."
            )
    return first.clone()


def _shard_placement(name: str, shard: VerlShard) -> PickledObject:
    """How a weight is distributed over the ranks that shard it. With HSDP, the first dimension of the mesh
    holds replicas."""
    placements = shard.placements
    if len(placements) == 2 and _is(placements[0], "Replicate"):
        placements = placements[1:]
    if len(placements) != 1 or not (_is(placements[0], "Shard") or _is(placements[0], "Replicate")):
        kinds = ", ".join(type(placement).__name__ for placement in shard.placements)
        raise ValueError(
            f"{name} is laid out as ({kinds}); only sharded and replicated weights of FSDP can be put "
            "together."
        )
    return placements[0]


def _is(placement: PickledObject, kind: str) -> bool:
    return type(placement).__name__ == kind


def _dimension(placement: PickledObject) -> int:
    """The dimension of a `Shard` placement, which torch pickled as an attribute or as an argument."""
    if "dim" in placement.__dict__:
        return int(placement.__dict__["dim"])
    dimension = placement.arguments[0]
    assert isinstance(dimension, int)
    return dimension


def _load(file: Path) -> dict[str, Shard]:
    """The weights of one rank's file."""
    reader = types.ModuleType("strop.run.merge.verl.reader")
    reader.Unpickler = _RestrictedUnpickler  # type: ignore[attr-defined]
    try:
        content = torch.load(file, map_location="cpu", weights_only=False, pickle_module=reader)
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, KeyError, OSError) as error:
        message = " ".join(str(error).split())[:300]
        raise ValueError(f"{file} cannot be read: {message}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not weights by name.")
    return content


class _RestrictedUnpickler(pickle.Unpickler):
    """Builds tensors and PickledObjects; calls nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if name == "_rebuild_from_type_v2" and module == "torch._tensor":
            return _rebuild_from_type
        if name == "_rebuild_wrapper_subclass" and module == "torch._utils":
            return _rebuild_shard
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if module.startswith(("torch.distributed", "torch._C._distributed")) and name.isidentifier():
            return type(name, (PickledObject,), {})
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is no part of saved weights. Reading it could run code, so it "
            "is refused."
        )


def _rebuild_from_type(
    function: Callable[..., object], kind: type, arguments: tuple[object, ...], state: object
) -> object:
    rebuilt = function(*arguments)
    if isinstance(rebuilt, PickledObject):
        rebuilt.__setstate__(state)
    return rebuilt


def _rebuild_shard(kind: type, dtype: torch.dtype, size: Sequence[int], *_: object) -> VerlShard:
    return VerlShard(shape=tuple(size))
