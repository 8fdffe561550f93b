"""Tensors that many ranks hold together, on the disk: every rank writes its pieces, any number of ranks reads them.

The files are those of torch.distributed.checkpoint's safetensors storage (`HuggingFaceStorageReader` reads them too): in the
header of each stands where in the whole tensor a piece begins. Nothing in them can run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strop.run.durable import Fingerprint
from strop.run.tensor_file import write_tensors

_OFFSETS, _VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
Region = tuple[slice, ...]


@dataclass
class SavedTensor:
    """A tensor in one or more files, of which any region can be read."""

    shape: tuple[int, ...]
    pieces: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)
    """Where each begins, and a view of it in its file."""
    name: str = ""
    files: list[Path] = field(default_factory=list)
    """Where it can be found again: that is what travels when it is sent to another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _found_again, (self.name, self.files)

    def read(self, region: Region | None = None) -> Tensor:
        """The whole tensor, or a part of it, in memory of its own."""
        wanted = [(0, size) for size in self.shape] if region is None else [(part.start, part.stop) for part in region]
        result: Tensor | None = None
        filled = 0
        for start, view in self.pieces:
            lows = [max(low, begin) for (low, _), begin in zip(wanted, start)]
            highs = [min(high, begin + size) for (_, high), begin, size in zip(wanted, start, view.get_shape())]
            if any(low >= high for low, high in zip(lows, highs)):
                continue
            inside = tuple(slice(low - begin, high - begin) for low, high, begin in zip(lows, highs, start))
            found = view[inside] if inside else view[...]
            if result is None:
                result = found.new_empty([high - low for low, high in wanted])
            result[tuple(slice(low - begin, high - begin) for low, high, (begin, _) in zip(lows, highs, wanted))] = found
            filled += found.numel()
        whole = 1
        for low, high in wanted:
            whole *= high - low
        if result is None and whole == 0:
            return torch.empty([high - low for low, high in wanted])
        if result is None or filled != whole:
            raise ValueError(f"the files hold {filled} of the {whole} numbers of a tensor of shape {list(self.shape)}")
        return result


def open_tensors(files: Iterable[Path], only: str | None = None) -> dict[str, SavedTensor]:
    """Every tensor in these files by name, or `only` that one; pieces of one tensor are found by its name."""
    found: dict[str, SavedTensor] = {}
    for file in files:
        opened: Any = safe_open(file, framework="pt")
        offsets = json.loads((opened.metadata() or {}).get(_OFFSETS, "{}"))
        for name in opened.keys() if only is None else [only]:
            view = opened.get_slice(name)
            shape = view.get_shape()
            start = tuple(offsets[name]["saved_offsets"]) if name in offsets else (0,) * len(shape)
            ends = tuple(begin + size for begin, size in zip(start, shape))
            known = found.setdefault(name, SavedTensor(ends, name=name))
            known.shape = tuple(max(pair) for pair in zip(known.shape, ends))
            known.pieces.append((start, view))
            known.files.append(file)
    return found


def _found_again(name: str, files: list[Path]) -> SavedTensor:
    return open_tensors(files, only=name)[name]


@dataclass(frozen=True)
class Piece:
    """What this rank writes of a tensor."""

    tensor: Tensor
    start: tuple[int, ...]


def piece_of(tensor: DTensor) -> Piece | None:
    """This rank's piece; None where it is empty, or where another rank with the same piece writes it."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    copies = [place for place, kind in zip(coordinate, tensor.placements) if kind.is_replicate()]
    local = tensor.to_local()
    # Ranks that divide matrices hold the weights that are not divided once each, on meshes that do not know of each other.
    if any(copies) or not local.numel() or 0 not in mesh.mesh:
        return None
    return Piece(local, tuple(compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)[1]))


def shard_file(part: str, rank: int) -> str:
    return f"{part}/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write_pieces(path: Path, pieces: Mapping[str, Piece]) -> Fingerprint:
    offsets = {name: {"saved_offsets": list(piece.start)} for name, piece in pieces.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_tensors(
        path, {name: piece.tensor for name, piece in pieces.items()}, {_OFFSETS: json.dumps(offsets), _VERSION: "1.0"}
    )
