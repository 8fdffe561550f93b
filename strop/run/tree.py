"""Trees of tensors and plain values, taken apart into JSON and tensors and put together again without loss.

A tree is a tensor, None, a bool, int, float or str, or a list, tuple or dict of trees. JSON knows fewer shapes than that, so a
one-key object whose key starts with `$` stands for the others:

    {"$tensor": name}  {"$tuple": [...]}  {"$dict": [[key, value], ...]} (keys that are no plain strings)  {"$float": "nan"}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.run.tensor_file import DTYPES

Tree = Any


def split(tree: Tree, *, name: str = "the tree") -> tuple[Any, dict[str, Tensor]]:
    """(a JSON value, the tensors it names). A tensor that stands in several places, as tied weights do, is named once.

    `name` is how errors call the tree.

    >>> split({"weight": torch.ones(2), "step": 3})
    ({'weight': {'$tensor': 'weight'}, 'step': 3}, {'weight': tensor([1., 1.])})
    """
    splitter = _Splitter(name)
    return splitter.encode(tree, ()), splitter.tensors


def join(plain: Any, tensors: Mapping[str, Any]) -> Tree:
    """The tree that `split` took apart; `tensors` may be stand-ins for tensors."""
    if isinstance(plain, list):
        return [join(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    mark = next(iter(plain), "")
    if len(plain) != 1 or not mark.startswith("$"):
        return {key: join(value, tensors) for key, value in plain.items()}
    content = plain[mark]
    if mark == "$tensor":
        return tensors[content]
    if mark == "$tuple":
        return tuple(join(item, tensors) for item in content)
    if mark == "$dict":
        return {join(key, tensors): join(value, tensors) for key, value in content}
    if mark == "$float":
        return float(content)
    raise ValueError(f"The mark {mark!r} is not known. A newer version of Strop may have written this.")


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, in host memory that no training step writes to."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


class _Splitter:
    def __init__(self, name: str):
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Tree, path: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, path)}
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        raise ValueError(
            f"{self._where(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold. "
            "Give tensors, None, bool, int, float, str, or lists, tuples and dicts of those."
        )

    def _mapping(self, value: Mapping[Any, Tree], path: tuple[str, ...]) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        pairs = [[self.encode(key, (*path, "key")), self.encode(item, (*path, str(key)))] for key, item in value.items()]
        return {"$dict": pairs}

    def _tensor(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        self._refuse_unusual(tensor, path)
        address = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()  # 0 where nothing is stored here
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
        if type(tensor) not in (Tensor, torch.nn.Parameter, DTensor) or tensor.layout != torch.strided or tensor.is_meta:
            what = f"{type(tensor).__qualname__} (layout {tensor.layout}, device {tensor.device})"
            raise ValueError(f"{self._where(path)} is a {what}. A checkpoint holds whole, dense tensors: gather it first.")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{self._where(path)} has dtype {tensor.dtype}, which safetensors cannot hold. Convert it first.")

    def _where(self, path: tuple[str, ...]) -> str:
        return f"{self.name}: {'.'.join(path)}" if path else self.name
