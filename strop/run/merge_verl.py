"""verl's FSDP checkpoints: one pickle of tensor shards per rank, put together without running anything that is in them.

    actor/model_world_size_4_rank_0.pt ...    weights; a DTensor of every parameter, of which the file holds this rank's piece
    actor/fsdp_config.json                    {"FSDP_version": 2, "world_size": 4}
    actor/huggingface/                        config and tokenizer
    actor/lora_adapter/adapter_config.json    with LoRA

A pickle can name any function to be called. Here only tensors, plain containers and the descriptions of shards are read (the
latter as bags of values, whatever version of torch wrote them); any other name is refused.
"""

from __future__ import annotations

import collections
import json
import pickle
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_PLAIN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch.serialization", "_get_layout"): lambda name: name,
}


class Bag:
    """Something of torch.distributed: its values, none of its behaviour."""

    def __init__(self, *arguments: Any, **named: Any):
        self.arguments = arguments
        self.__dict__.update(named)

    def __setstate__(self, state: Any) -> None:
        for values in state if isinstance(state, tuple) else (state,):
            if isinstance(values, dict):
                self.__dict__.update(values)


class Piece(Bag):
    """A rank's share of a tensor."""

    shape: tuple[int, ...]
    """Of the whole."""

    @property
    def local(self) -> Tensor:
        return self.__dict__["_local_tensor"]

    @property
    def placements(self) -> tuple[Bag, ...]:
        return tuple(self.__dict__["_spec"].placements)


def is_verl(folder: Path) -> bool:
    return folder.is_dir() and any(_FILE.fullmatch(file.name) for file in folder.iterdir())


def read_shards(folder: Path) -> dict[str, Tensor]:
    """The whole weights of a checkpoint folder such as global_step_20/actor."""
    files = _rank_files(folder)
    shards = [_load(file) for file in files]
    names = list(shards[0])
    for file, shard in zip(files, shards):
        if list(shard) != names:
            odd = sorted(set(names) ^ set(shard))[:3]
            raise ValueError(f"{file} holds other weights than {files[0].name}; only one of them has {', '.join(odd)}.")
    return {name: _joined(name, [shard.pop(name) for shard in shards]) for name in names}


def _rank_files(folder: Path) -> list[Path]:
    found: dict[int, dict[int, Path]] = {}
    for file in folder.iterdir():
        match = _FILE.fullmatch(file.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = file
    world = max(found)
    about = folder / "fsdp_config.json"
    if about.is_file():
        world = int(json.loads(about.read_text())["world_size"])
    ranks = found.get(world, {})
    missing = [rank for rank in range(world) if rank not in ranks]
    if missing:
        raise ValueError(
            f"{folder} is a checkpoint of {world} ranks, but model_world_size_{world}_rank_{missing[0]}.pt is missing "
            f"({len(missing)} files in all). Copy the files of every machine into one folder."
        )
    return [ranks[rank] for rank in range(world)]


def _joined(name: str, pieces: Sequence[Any]) -> Tensor:
    first = pieces[0]
    if isinstance(first, Tensor):
        if any(not torch.equal(first, other) for other in pieces[1:]):
            raise ValueError(f"{name} is a plain tensor that differs between ranks, so nothing says how to put it together.")
        return first.clone()
    placements = first.placements
    if len(placements) == 2 and _is(placements[0], "Replicate"):
        placements = placements[1:]  # replicas of the same shards, one after the other
    if len(placements) != 1 or not (_is(placements[0], "Shard") or _is(placements[0], "Replicate")):
        kinds = ", ".join(type(placement).__name__ for placement in first.placements)
        raise ValueError(f"{name} is laid out as ({kinds}); only sharded and replicated weights of FSDP can be put together.")
    if _is(placements[0], "Replicate"):
        return first.local.clone()
    along = _dimension(placements[0])
    parts: list[Tensor] = []
    for piece in pieces:
        if sum(part.shape[along] for part in parts) < first.shape[along]:
            parts.append(piece.local)
    whole = torch.cat(parts, dim=along)
    if tuple(whole.shape) != tuple(first.shape):
        raise ValueError(
            f"The pieces of {name} make a tensor of shape {tuple(whole.shape)}, but {tuple(first.shape)} was saved. Are the "
            "files of one step and one run?"
        )
    return whole


def _is(placement: Bag, kind: str) -> bool:
    return type(placement).__name__ == kind


def _dimension(placement: Bag) -> int:
    return int(placement.__dict__["dim"] if "dim" in placement.__dict__ else placement.arguments[0])


def _load(file: Path) -> dict[str, Any]:
    reader = types.ModuleType("strop.run.merge_verl.reader")
    reader.Unpickler = _Careful  # type: ignore[attr-defined]
    try:
        content = torch.load(file, map_location="cpu", weights_only=False, pickle_module=reader)
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, KeyError, OSError) as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"{file} cannot be read: {said}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not weights by name.")
    return content


class _Careful(pickle.Unpickler):
    """Knows tensors and bags; calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if name == "_rebuild_from_type_v2" and module == "torch._tensor":
            return _rebuild_from_type
        if name == "_rebuild_wrapper_subclass" and module == "torch._utils":
            return _rebuild_piece
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if module.startswith(("torch.distributed", "torch._C._distributed")) and name.isidentifier():
            return type(name, (Bag,), {})
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is no part of saved weights. Reading it could run code, so it is refused."
        )


def _rebuild_from_type(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    made = function(*arguments)
    if isinstance(made, Bag):
        made.__setstate__(state)
    return made


def _rebuild_piece(kind: Any, dtype: torch.dtype, size: Sequence[int], *_: Any) -> Piece:
    return Piece(shape=tuple(size))
