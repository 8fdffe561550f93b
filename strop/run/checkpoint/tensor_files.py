"""Tensors as safetensors files, and trees of tensors and plain values as JSON plus tensors.

Files are written here, chunk by chunk (8 bytes of header length, a JSON header, the raw numbers): a full disk
is an ordinary OSError, the checksum needs no second pass, and device tensors are copied one at a time. The
safetensors library reads them.

A tree is a tensor, None, a bool, int, float or str, or a list, tuple or dict of trees. What JSON has no form
for is written as an object with one key that starts with `$`:

    {"$tensor": name}  {"$tuple": [...]}  {"$dict": [[key, value], ...]} (keys that are no plain strings)
    {"$float": "nan"}
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.run.atomic_files import CHUNK, Fingerprint, write_file

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None
) -> Fingerprint:
    """Write a file of tensors; `facts` are added to the metadata in its header."""
    return write_file(path, _pieces(tensors, facts or {}))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, copied into memory: the file may be deleted or replaced afterwards."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _pieces(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    # Wide types first keeps every tensor aligned to its own width, which readers that map the file rely on.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    yield _header(names, tensors, facts)
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        if not len(flat):  # an empty array of NumPy has no stride that `view` takes
            continue
        raw = flat.view(torch.uint8).numpy().data
        for start in range(0, len(raw), CHUNK):
            yield raw[start : start + CHUNK]


def _header(names: Sequence[str], tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    # transformers refuses a file that does not say which framework wrote it.
    header: dict[str, object] = {"__metadata__": {"format": "pt", **facts}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start = end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


Tree = Any
"""See the top of this file; a recursive type would need a check at every access of a loaded state."""


def split(tree: Tree, *, name: str = "the tree") -> tuple[Tree, dict[str, Tensor]]:
    """(a JSON value, the tensors it names). A tensor that occurs several times, as tied weights do, is stored
    once.

    `name` is the name of the tree in error messages.

    >>> split({"weight": torch.ones(2), "step": 3})
    ({'weight': {'$tensor': 'weight'}, 'step': 3}, {'weight': tensor([1., 1.])})
    """
    splitter = _Splitter(name)
    return splitter.encode(tree, ()), splitter.tensors


MAX_DEPTH = 100
"""Containers inside each other. A run writes a few; a damaged file may have thousands."""


def join(plain: Tree, tensors: Mapping[str, object], depth: int = 0) -> Tree:
    """The inverse of `split`; `tensors` may be SavedTensors instead of tensors. `depth`: containers around
    `plain`."""
    if depth > MAX_DEPTH:
        raise ValueError(f"More than {MAX_DEPTH} containers are inside each other.")

    def inner(value: Tree) -> Tree:
        return join(value, tensors, depth + 1)

    if isinstance(plain, list):
        return [inner(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    mark = next(iter(plain), "")
    if len(plain) != 1 or not mark.startswith("$"):
        return {key: inner(value) for key, value in plain.items()}
    content = plain[mark]
    if mark == "$tensor":
        return tensors[content]
    if mark == "$tuple":
        return tuple(inner(item) for item in content)
    if mark == "$dict":
        return {inner(key): inner(value) for key, value in content}
    if mark == "$float":
        return float(content)
    raise ValueError(f"The mark {mark!r} is not known. A newer version of Strop may have written this.")


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors in host memory, which training does not write to."""
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        copies[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copies


def _is_plain_key(key: object) -> bool:
    return type(key) is str and not key.startswith("$")


class _Splitter:
    """Collects the tensors of a tree while it is encoded."""

    def __init__(self, name: str):
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[tuple[object, ...], str] = {}

    def encode(self, value: Tree, path: tuple[str, ...]) -> Tree:
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, path)}
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return {"$tuple": self._items(value, path)}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        raise ValueError(
            f"{self._where(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
            "hold. Give tensors, None, bool, int, float, str, or lists, tuples and dicts of those."
        )

    def _items(self, values: Sequence[Tree], path: tuple[str, ...]) -> list[Tree]:
        return [self.encode(item, (*path, str(i))) for i, item in enumerate(values)]

    def _mapping(self, value: Mapping[Tree, Tree], path: tuple[str, ...]) -> Tree:
        if all(map(_is_plain_key, value)):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            pairs.append([self.encode(key, (*path, "key")), self.encode(item, (*path, str(key)))])
        return {"$dict": pairs}

    def _tensor(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        self._refuse_unusual(tensor, path)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        address = local.data_ptr()  # 0 where this rank stores nothing
        place = (tensor.device, address, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if address and place in self._places:
            return self._places[place]
        base = name = ".".join(path) or "tensor"
        copies = 1
        while name in self.tensors:
            copies += 1
            name = f"{base}#{copies}"
        self.tensors[name] = tensor
        if address:
            self._places[place] = name
        return name

    def _refuse_unusual(self, tensor: Tensor, path: tuple[str, ...]) -> None:
        if (
            type(tensor) not in (Tensor, torch.nn.Parameter, DTensor)
            or tensor.layout != torch.strided
            or tensor.is_meta
        ):
            what = f"{type(tensor).__qualname__} (layout {tensor.layout}, device {tensor.device})"
            raise ValueError(
                f"{self._where(path)} is a {what}. A checkpoint holds whole, dense tensors: gather it first."
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{self._where(path)} has dtype {tensor.dtype}, which safetensors cannot hold. Convert it "
                "first."
            )

    def _where(self, path: tuple[str, ...]) -> str:
        return f"{self.name}: {'.'.join(path)}" if path else self.name
