"""Read verl's FSDP checkpoints without running code from them: one pickle of tensor shards per rank.

    actor/model_world_size_4_rank_0.pt ...    a DTensor of every parameter, with the local shard of that rank
    actor/fsdp_config.json                    {"FSDP_version": 2, "world_size": 4}
    actor/huggingface/                        config and tokenizer
    actor/lora_adapter/adapter_config.json    with LoRA

This reader accepts tensors, plain containers and the classes of torch.distributed that describe shards.
Those are read as records of attributes (plain_pickle.py), so that the version of torch that wrote them does
not matter. Any other name is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from strop.run.merge.archive import find_tensor_name, read_archive, sizes_of
from strop.run.merge.plain_pickle import NamedClass, NamedFunction, PickledObject, call

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_CLASS = re.compile(r"[A-Za-z_]\w{0,79}", re.ASCII)
_MODULES = ("torch.distributed.", "torch._C._distributed")


@dataclass(frozen=True)
class ShardPlacement:
    """How a tensor is distributed over one dimension of the device mesh."""

    kind: str
    """`Shard`, `Replicate` ..."""
    dimension: int = 0
    """Of the tensor, which `Shard` divides."""


@dataclass(frozen=True)
class VerlShard:
    """One rank's shard of a tensor."""

    local: Tensor
    shape: tuple[int, ...]
    """Of the full tensor."""
    placements: tuple[ShardPlacement, ...]


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
    if (folder / "fsdp_config.json").is_file():
        world = _world_size(folder / "fsdp_config.json")
    ranks = found.get(world, {})
    present = [rank for rank in ranks if rank < world]
    if len(present) < world:
        missing = next(rank for rank in range(world) if rank not in ranks)
        raise ValueError(
            f"{folder} is a checkpoint of {world} ranks, but model_world_size_{world}_rank_{missing}.pt "
            f"is missing ({world - len(present)} files in all). Copy the files of every machine into one "
            "folder."
        )
    return [ranks[rank] for rank in range(world)]


def _world_size(file: Path) -> int:
    content = read_object(file)
    world = content.get("world_size")
    if type(world) is not int or world < 1:
        raise ValueError(f"{file} has world_size={str(world)[:40]}; it must be a number of at least 1.")
    return world


def read_object(file: Path) -> dict[str, object]:
    """A file of JSON that holds keys and values; ValueError if it does not."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; keys and values are needed.")
    return content


def _concatenate(name: str, shards: Sequence[Shard]) -> Tensor:
    """The full tensor from the shards of all ranks."""
    first = shards[0]
    if isinstance(first, Tensor):
        return _replicated(name, first, shards)
    placement = _shard_placement(name, first)
    if placement.kind == "Replicate":
        if tuple(first.local.shape) != first.shape:
            raise ValueError(
                f"{name} is replicated, but its local tensor has shape {tuple(first.local.shape)} and not "
                f"{first.shape}."
            )
        return first.local.clone()
    if placement.dimension >= len(first.shape):
        raise ValueError(f"{name} is divided along a dimension that its shape {first.shape} does not have.")
    full_size = first.shape[placement.dimension]
    parts: list[Tensor] = []
    size = 0
    for shard in shards:
        if not isinstance(shard, VerlShard):
            raise ValueError(f"{name} is sharded on some ranks and whole on others.")
        if size < full_size:
            _check_part(name, shard.local, first, placement.dimension)
            parts.append(shard.local)
            size += shard.local.shape[placement.dimension]
    if not parts:
        return torch.empty(first.shape, dtype=first.local.dtype)
    whole = torch.cat(parts, dim=placement.dimension)
    if tuple(whole.shape) != first.shape:
        raise ValueError(
            f"The pieces of {name} make a tensor of shape {tuple(whole.shape)}, but {first.shape} was "
            "saved. Are the files of one step and one run?"
        )
    return whole


def _check_part(name: str, part: Tensor, first: VerlShard, dimension: int) -> None:
    expected = list(first.shape)
    found = list(part.shape)
    if len(found) == len(expected):
        expected[dimension] = found[dimension]
    if found != expected or part.dtype != first.local.dtype:
        raise ValueError(
            f"A piece of {name} has shape {found} and {part.dtype}, which is no part of {first.shape} and "
            f"{first.local.dtype}."
        )


def _replicated(name: str, first: Tensor, copies: Sequence[Shard]) -> Tensor:
    """A tensor that every rank saved in full; all copies must be equal."""
    for copy in copies[1:]:
        if not isinstance(copy, Tensor) or not torch.equal(first, copy):
            raise ValueError(
                f"{name} is a plain tensor that differs between ranks, so nothing says how to put it "
                "together."
            )
    return first.clone()


def _shard_placement(name: str, shard: VerlShard) -> ShardPlacement:
    """How a weight is distributed over the ranks that shard it. With HSDP, the first dimension of the mesh
    holds replicas."""
    placements = shard.placements
    if len(placements) == 2 and placements[0].kind == "Replicate":
        placements = placements[1:]
    if len(placements) != 1 or placements[0].kind not in ("Shard", "Replicate"):
        kinds = ", ".join(placement.kind for placement in shard.placements)
        raise ValueError(
            f"{name} is laid out as ({kinds}); only sharded and replicated weights of FSDP can be put "
            "together."
        )
    return placements[0]


# --- one file -----------------------------------------------------------------------------------------------


def _load(file: Path) -> dict[str, Shard]:
    """The weights of one rank's file."""
    content = read_archive(file, _find_name)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not weights by name.")
    weights: dict[str, Shard] = {}
    for name, value in content.items():
        if not isinstance(name, str):
            raise ValueError(f"{file} holds a weight whose name is a {type(name).__name__}.")
        try:
            weights[name] = _shard(value)
        except ValueError as error:
            raise ValueError(f"{file} holds {name[:80]!r}, which is no weight: {error}") from error
    return weights


def _shard(value: object) -> Shard:
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, PickledObject) or value.kind != "DTensor":
        raise ValueError(f"it is a {type(value).__name__}.")
    local = value.attributes.get("_local_tensor")
    spec = value.attributes.get("_spec")
    if not isinstance(local, Tensor) or not isinstance(spec, PickledObject):
        raise ValueError("the DTensor has no _local_tensor or no _spec.")
    placements = spec.attributes.get("placements")
    if not isinstance(placements, tuple | list):
        raise ValueError("the DTensor has no placements.")
    shape = sizes_of(value.attributes.get("shape"))
    return VerlShard(local, shape, tuple(_placement(item, len(shape)) for item in placements))


def _placement(item: object, dimensions: int) -> ShardPlacement:
    """A placement, whose dimension torch pickled as an attribute or as an argument."""
    if not isinstance(item, PickledObject):
        raise ValueError(f"a placement is a {type(item).__name__}.")
    if item.kind != "Shard":
        return ShardPlacement(item.kind)
    dimension = item.attributes.get("dim")
    if dimension is None and item.arguments:
        dimension = item.arguments[0]
    if type(dimension) is not int or not -dimensions <= dimension < max(dimensions, 1):
        raise ValueError(f"it is sharded along {str(dimension)[:40]} of {dimensions} dimensions.")
    return ShardPlacement("Shard", dimension % max(dimensions, 1))


def _find_name(module: str, name: str) -> object:
    if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
        return NamedFunction(_rebuild_from_type)
    if (module, name) == ("torch._utils", "_rebuild_wrapper_subclass"):
        return NamedFunction(_rebuild_shard)
    if module.startswith(_MODULES) and _CLASS.fullmatch(name):
        return NamedClass(name)
    return find_tensor_name(module, name)


def _rebuild_from_type(arguments: tuple[object, ...]) -> object:
    """(function, class, arguments, state)"""
    if len(arguments) != 4:
        raise ValueError("it rebuilds a tensor with wrong arguments")
    rebuilt = call(arguments[0], arguments[2])
    if isinstance(rebuilt, PickledObject):
        rebuilt.set_state(arguments[3])
    return rebuilt


def _rebuild_shard(arguments: tuple[object, ...]) -> PickledObject:
    """(class, dtype, size, ...)"""
    if len(arguments) < 3 or not isinstance(arguments[0], NamedClass):
        raise ValueError("it rebuilds a sharded tensor with wrong arguments")
    return PickledObject(arguments[0].name, attributes={"shape": arguments[2]})
