"""Read a checkpoint of torch.distributed.checkpoint (Megatron's "torch_dist") without running code from it.

    .metadata            a pickle: name and shape of every tensor, and where its pieces are
    __0_0.distcp ...     pieces of tensors, each as torch.save writes it
    metadata.json        {"sharded_backend": "torch_dist", ...}

torch reads .metadata with Python's unpickler. Here it is read as records of attributes (plain_pickle.py). A
tensor is read piece by piece, so any region of it can be read alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from strop.run.merge.archive import DTYPES, find_tensor_name, read_part, sizes_of
from strop.run.merge.plain_pickle import NamedClass, PickledObject, read_pickle
from strop.run.merge.verl import read_object

METADATA = ".metadata"
_CLASSES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.", "pathlib")
_CLASS = re.compile(r"[A-Za-z_]\w{0,79}", re.ASCII)
_FILE = re.compile(r"[\w.-]{1,200}", re.ASCII)

Region = tuple[slice, ...]
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class SavedPiece:
    """A block of a tensor, and the bytes of a file that hold it."""

    start: tuple[int, ...]
    """Of the block in the tensor."""
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int


@dataclass
class DistTensor:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[SavedPiece] = field(default_factory=list)

    def read(self, region: Region | None = None) -> Tensor:
        """This region of it; only the pieces that overlap it are read."""
        wanted = region or (slice(None),) * len(self.shape)
        bounds = [part.indices(size) for part, size in zip(wanted, self.shape, strict=True)]
        found = torch.empty([stop - start for start, stop, _ in bounds], dtype=self.dtype)
        filled = 0
        for piece in self.pieces:
            inside = _overlap(piece, bounds)
            if inside is None:
                continue
            source, target = inside
            filled += found[target].copy_(self._of_piece(piece)[source]).numel()
        if filled != found.numel():
            raise ValueError(
                f"The pieces of {self.name} have {filled} of its {found.numel()} numbers. Copy the files of "
                "every machine into one folder."
            )
        return found

    def _of_piece(self, piece: SavedPiece) -> Tensor:
        content = read_part(piece.file, piece.offset, piece.length, find_tensor_name)
        if not isinstance(content, Tensor) or content.numel() != _count(piece.shape):
            raise ValueError(f"{piece.file} does not hold a piece of {self.name} of shape {piece.shape}.")
        return content.reshape(piece.shape)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _overlap(piece: SavedPiece, bounds: Sequence[tuple[int, int, int]]) -> tuple[Region, Region] | None:
    """The part of the piece inside the bounds: its place in the piece, and in the region."""
    source: list[slice] = []
    target: list[slice] = []
    for start, size, (first, stop, _) in zip(piece.start, piece.shape, bounds, strict=True):
        begin = max(start, first)
        end = min(start + size, stop)
        if begin >= end:
            return None
        source.append(slice(begin - start, end - start))
        target.append(slice(begin - first, end - first))
    return tuple(source), tuple(target)


def is_dist_checkpoint(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def read_dist_checkpoint(folder: Path) -> dict[str, DistTensor]:
    """The tensors of a checkpoint, by name; nothing but their description is read."""
    described = folder / "metadata.json"
    if described.is_file():
        kind = read_object(described).get("sharded_backend")
        if kind != "torch_dist":
            raise ValueError(f"{folder} is in the format {str(kind)[:40]!r}; only torch_dist can be read.")
    file = folder / METADATA
    try:
        content = read_pickle(file.read_bytes(), _find_name, _no_storage)
        return dict(_tensors(folder, content))
    except (ValueError, OSError, EOFError, OverflowError) as error:
        message = " ".join(str(error).split())[:300]
        raise ValueError(f"{file} cannot be read: {message}") from error


def _find_name(module: str, name: str) -> object:
    if module.startswith(_CLASSES) and _CLASS.fullmatch(name):
        return NamedClass(name)
    return find_tensor_name(module, name)


def _no_storage(identity: object) -> object:
    raise ValueError("it refers to a storage, which a description does not have")


def _tensors(folder: Path, content: object) -> Iterator[tuple[str, DistTensor]]:
    names = _attribute(content, "state_dict_metadata", dict)
    places = _places(folder, _attribute(content, "storage_data", dict))
    for name, described in names.items():
        if not isinstance(described, PickledObject) or described.kind != "TensorStorageMetadata":
            continue  # bytes, such as random states
        shape = sizes_of(described.attributes.get("size"))
        tensor = DistTensor(str(name), shape, _dtype(described.attributes.get("properties")))
        for chunk in _attribute(described, "chunks", list):
            start = sizes_of(_attribute(chunk, "offsets", tuple))
            size = sizes_of(_attribute(chunk, "sizes", tuple))
            place = places.get((str(name), start))
            if place is None or len(start) != len(shape) or len(size) != len(shape):
                raise ValueError(f"it does not say where the piece of {str(name)[:80]} at {start} is")
            tensor.pieces.append(SavedPiece(start, size, *place))
        yield str(name), tensor


def _places(folder: Path, stored: dict[object, object]) -> dict[object, tuple[Path, int, int]]:
    """(name, start of a piece) -> where it is."""
    found: dict[object, tuple[Path, int, int]] = {}
    for index, info in stored.items():
        if not isinstance(index, PickledObject) or index.attributes.get("offset") is None:
            continue
        file = _attribute(info, "relative_path", str)
        if not _FILE.fullmatch(file):
            raise ValueError(f"it names the file {file[:80]!r}, which is not in its folder")
        place = (folder / file, _attribute(info, "offset", int), _attribute(info, "length", int))
        if isinstance(info, PickledObject) and info.attributes.get("transform_descriptors"):
            raise ValueError(f"{file} is transformed (compressed or encrypted)")
        found[_attribute(index, "fqn", str), sizes_of(index.attributes["offset"])] = place
    return found


def _dtype(properties: object) -> torch.dtype:
    """Of the pickled state of TensorProperties: a tuple that begins with it."""
    if isinstance(properties, PickledObject):
        for value in (*properties.state, *properties.attributes.values()):
            if value in DTYPES.values() and isinstance(value, torch.dtype):
                return value
    raise ValueError("it has a tensor without a dtype")


def _attribute(record: object, name: str, kind: type[Kind]) -> Kind:
    value = record.attributes.get(name) if isinstance(record, PickledObject) else None
    if not isinstance(value, kind):
        raise ValueError(f"it has no {name}")
    return value
