"""Sharded tensors on the disk: every rank writes its pieces, and any number of ranks reads them.

The files have the format of torch.distributed.checkpoint's safetensors storage (`HuggingFaceStorageReader`
reads them too): the header of each file holds the offset of every piece in its full tensor. Nothing in them
can run code.

Ranks that write one checkpoint together leave receipts, which rank 0 collects. Receipts are files in the
hidden folder of the checkpoint: saving runs in the background, where ranks must not use the process groups of
training.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strop.ranks import STAGE
from strop.run.atomic_files import Fingerprint, replace_text
from strop.run.checkpoint.tensor_files import copy_to_host, write_tensors

_OFFSETS = "DCP_SHARDING_INFO"
_VERSION = "DCP_VERSION"
Region = tuple[slice, ...]
Bounds = list[tuple[int, int]]
"""(start, end) of a region in each dimension."""


class TensorView(Protocol):
    """A tensor in an open safetensors file."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, region: object) -> Tensor: ...


@dataclass
class SavedTensor:
    """A tensor in one or more files; any region of it can be read."""

    shape: tuple[int, ...]
    pieces: list[tuple[tuple[int, ...], TensorView]] = field(default_factory=list)
    """Offset of each piece, and a view of it in its file."""
    name: str = ""
    files: list[Path] = field(default_factory=list)
    """Its files: these are what is pickled when it is sent to another process."""

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.name, self.files)

    def read(self, region: Region | None = None) -> Tensor:
        """The whole tensor, or a region of it, in memory of its own."""
        if region is None:
            region = tuple(slice(0, size) for size in self.shape)
        wanted = [(part.start, part.stop) for part in region]
        origin = [low for low, _ in wanted]
        sizes = [high - low for low, high in wanted]
        overlaps: list[tuple[Bounds, tuple[int, ...], TensorView]] = []
        filled = 0
        for start, view in self.pieces:
            overlap = _overlap(wanted, start, view.get_shape())
            if overlap is not None:
                overlaps.append((overlap, start, view))
                filled += math.prod(high - low for low, high in overlap)
        total = math.prod(sizes)
        if not overlaps and total == 0:
            return torch.empty(sizes)
        if filled != total:  # checked before memory is allocated: damaged offsets can ask for any amount
            raise ValueError(
                f"the files hold {filled} of the {total} numbers of a tensor of shape {list(self.shape)}"
            )
        result: Tensor | None = None
        for overlap, start, view in overlaps:
            inside = _relative(overlap, start)
            found = view[inside] if inside else view[...]
            if result is None:
                result = found.new_empty(sizes)
            result[_relative(overlap, origin)] = found
        assert result is not None
        return result


def _overlap(wanted: Bounds, start: Sequence[int], shape: Sequence[int]) -> Bounds | None:
    """The part of a region that a piece holds; None where they do not overlap."""
    overlap = []
    for (low, high), offset, size in zip(wanted, start, shape):
        first = max(low, offset)
        last = min(high, offset + size)
        if first >= last:
            return None
        overlap.append((first, last))
    return overlap


def _relative(bounds: Bounds, origin: Sequence[int]) -> Region:
    """A region as slices relative to an origin."""
    return tuple(slice(low - offset, high - offset) for (low, high), offset in zip(bounds, origin))


def open_tensors(files: Iterable[Path], only: str | None = None) -> dict[str, SavedTensor]:
    """Every tensor in these files by name, or `only` that one; pieces of one tensor have the same name."""
    found: dict[str, SavedTensor] = {}
    for file in files:
        opened = safe_open(file, framework="pt")
        offsets = json.loads((opened.metadata() or {}).get(_OFFSETS, "{}"))
        names = opened.keys() if only is None else [only]
        for name in names:
            view = opened.get_slice(name)
            shape = view.get_shape()
            start = (0,) * len(shape)
            if name in offsets:
                start = _offsets(offsets[name]["saved_offsets"], len(shape))
            ends = tuple(map(sum, zip(start, shape)))
            saved = found.setdefault(name, SavedTensor(ends, name=name))
            if len(saved.shape) != len(ends):
                raise ValueError(f"the pieces of {name} have different numbers of dimensions")
            saved.shape = tuple(map(max, saved.shape, ends))
            saved.pieces.append((start, view))
            saved.files.append(file)
    return found


def _offsets(saved: object, dimensions: int) -> tuple[int, ...]:
    if not isinstance(saved, list) or len(saved) != dimensions:
        raise ValueError(f"a piece of a tensor has {dimensions} dimensions and no offset for each")
    for offset in saved:
        if type(offset) is not int or not 0 <= offset < 1 << 63:
            raise ValueError(f"a piece of a tensor begins at {str(offset)[:40]}")
    return tuple(saved)


def _reopen(name: str, files: list[Path]) -> SavedTensor:
    return open_tensors(files, only=name)[name]


@dataclass(frozen=True)
class TensorPiece:
    """The part of a tensor that this rank writes, and its offset."""

    tensor: Tensor
    start: tuple[int, ...]


def local_piece(tensor: DTensor) -> TensorPiece | None:
    """This rank's piece; None where it is empty, or where another rank with the same piece writes it."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # other ranks have it
        return None
    local = tensor.to_local()
    # With tensor parallelism each rank holds the unsharded weights once, on a mesh without the other ranks.
    # The ranks of a pipeline stage have weights of their own.
    is_copy = 0 not in mesh.mesh and STAGE not in (mesh.mesh_dim_names or ())
    if not local.numel() or is_copy:
        return None
    for position, placement in zip(coordinate, tensor.placements):
        if placement.is_replicate() and position != 0:
            return None
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return TensorPiece(local, tuple(offset))


def shard_file(part: str, rank: int) -> str:
    return f"{part}/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def is_shard_file(file: str, part: str) -> bool:
    """Whether a file of a checkpoint holds pieces of this part."""
    return file.startswith(f"{part}/shard-") and file.endswith(".safetensors")


def copy_pieces_to_host(pieces: Mapping[str, TensorPiece]) -> dict[str, TensorPiece]:
    """Copies of the pieces in host memory, which training does not write to."""
    tensors = copy_to_host({name: piece.tensor for name, piece in pieces.items()})
    copies: dict[str, TensorPiece] = {}
    for name, piece in pieces.items():
        copies[name] = TensorPiece(tensors[name], piece.start)
    return copies


def write_pieces(path: Path, pieces: Mapping[str, TensorPiece]) -> Fingerprint:
    """Write the pieces of this rank into one file."""
    tensors: dict[str, Tensor] = {}
    offsets: dict[str, object] = {}
    for name, piece in pieces.items():
        tensors[name] = piece.tensor
        offsets[name] = {"saved_offsets": list(piece.start)}
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_tensors(path, tensors, {_OFFSETS: json.dumps(offsets), _VERSION: "1.0"})


RECEIPT_TIMEOUT = 3600.0
"""Seconds that rank 0 waits for the slowest rank."""


def _receipt_file(folder: Path, rank: int) -> Path:
    return folder / f".written_by_{rank}.json"


def write_with_receipt(folder: Path, rank: int, write: Callable[[], Mapping[str, Fingerprint]]) -> None:
    """Run `write` and leave a receipt of its files, or of the error, which is raised. On a full disk there
    is room for the receipt when the pieces are deleted."""
    try:
        files = write()
    except BaseException as error:
        for piece in folder.rglob(Path(shard_file("", rank)).name):
            piece.unlink()
        code = error.errno if isinstance(error, OSError) else None
        text = json.dumps({"error": str(error) or type(error).__name__, "errno": code})
        replace_text(_receipt_file(folder, rank), text)
        raise
    content = {name: {"bytes": file.size, "crc32": file.crc32} for name, file in files.items()}
    replace_text(_receipt_file(folder, rank), json.dumps({"files": content}))


def collect_receipts(folder: Path, world: int) -> dict[str, Fingerprint]:
    """Wait for the receipts of all ranks but 0 and delete them; returns the files that those ranks wrote."""
    found: dict[str, Fingerprint] = {}
    deadline = time.monotonic() + RECEIPT_TIMEOUT
    for rank in range(1, world):
        receipt = _receipt_file(folder, rank)
        while not receipt.exists():
            if time.monotonic() > deadline:
                raise OSError(
                    f"rank {rank} has not written its part of the checkpoint for {RECEIPT_TIMEOUT:.0f} "
                    "seconds"
                )
            time.sleep(0.01)
        content = json.loads(receipt.read_text())
        if "error" in content:
            raise OSError(content["errno"], f"rank {rank}: {content['error']}")
        for name, file in content["files"].items():
            found[name] = Fingerprint(file["bytes"], file["crc32"])
        receipt.unlink()
    return found
