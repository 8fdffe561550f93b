"""Numbers computed by the published implementations, and the bridge to ours.

`data/*.json.gz` holds cases: which peer function was called, with what, and what came back (README.md beside it explains the
fields). An *adapter* calls our function with a case's inputs and returns its outputs under the peer's names:

    @adapts("verl.trainer.ppo.core_algos.agg_loss")
    def agg_loss(case):
        return {"loss": aggregate(case.tensor("loss_mat"), ...)}

An adapter may raise the peer's error for a `raises` case (any exception counts), or `NotApplicable(reason)`. Where a switch
is needed to reproduce the peer, the adapter writes `peer("verl", None)`: the first value gives the peer's number, the second is
our default. Every case is run both ways. It counts as *differing* if the defaults give another number, and then
`differences.py` must say why.
"""

from __future__ import annotations

import contextlib
import contextvars
import gzip
import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DATA = Path(__file__).parent / "data"
RELATIVE, ABSOLUTE = 1e-5, 1e-6


class NotApplicable(Exception):
    """The peer's function has no counterpart here, and the reason why."""


@dataclass
class Case:
    id: str
    function: str
    kwargs: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    dtypes: dict[str, dict[str, str]]
    tags: list[str]

    def tensor(self, name: str, *, grad: bool = False) -> torch.Tensor:
        """The input `name` (dotted path) as a tensor of its recorded dtype; with `grad`, a leaf that wants a gradient."""
        value: Any = self.inputs
        for part in name.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        kind = self.dtypes["inputs"].get(name, "float32").removeprefix("np.").partition("[")[0]
        shape = self.dtypes["inputs"].get(name, "").partition("[")[2].rstrip("]")
        made = torch.tensor(_numbers(value), dtype=getattr(torch, kind))
        if shape:
            made = made.reshape([int(n) for n in shape.split(",")])
        return made.requires_grad_() if grad else made

    @property
    def raises(self) -> str | None:
        return self.outputs.get("raises")


_reproducing = contextvars.ContextVar("reproducing", default=True)


def peer(theirs: Any, default: Any) -> Any:
    """The value of a switch: `theirs` while the peer is reproduced, `default` while our defaults are tried."""
    return theirs if _reproducing.get() else default


@contextlib.contextmanager
def our_defaults() -> Iterator[None]:
    token = _reproducing.set(False)
    try:
        yield
    finally:
        _reproducing.reset(token)


_adapters: dict[str, Callable[[Case], dict[str, Any]]] = {}


def adapts(*functions: str) -> Callable[[Any], Any]:
    def decorate(adapter: Any) -> Any:
        for function in functions:
            assert function not in _adapters, f"two adapters for {function}"
            _adapters[function] = adapter
        return adapter

    return decorate


def adapter_of(case: Case) -> Callable[[Case], dict[str, Any]]:
    if not _adapters:
        package = importlib.import_module("tests.golden.adapters")
        for found in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"tests.golden.adapters.{found.name}")
    return _adapters[case.function]


def cases(file: str) -> Iterator[Case]:
    for row in json.loads(gzip.decompress((DATA / f"{file}.json.gz").read_bytes())):
        yield Case(
            row["id"],
            row["function"],
            row.get("kwargs") or {},
            row.get("inputs") or {},
            row["outputs"],
            {"inputs": {}, "outputs": {}, **(row.get("dtypes") or {})},
            row.get("tags") or [],
        )


def files() -> list[str]:
    return sorted(f.name.removesuffix(".json.gz") for f in DATA.glob("*.json.gz"))


def compare(expected: Any, got: Any, where: str = "") -> list[str]:
    """Where two outputs differ, in words; nothing if they agree to 1e-5 relative / 1e-6 absolute."""
    if isinstance(got, torch.Tensor):
        got = got.detach().tolist()
    if hasattr(got, "tolist"):  # numpy
        got = got.tolist()
    expected = _numbers(expected)
    if isinstance(expected, dict):
        if not isinstance(got, dict):
            return [f"{where}: expected a dict, got {type(got).__name__}"]
        missing = [f"{where}.{key}: missing" for key in expected if key not in got]
        return missing + [
            line
            for key in expected
            if key in got
            for line in compare(expected[key], got[key], f"{where}.{key}")
        ]
    if isinstance(expected, list):
        if not isinstance(got, list | tuple) or len(got) != len(expected):
            return [f"{where}: expected {len(expected)} items, got {got!r:.80}"]
        return [
            line for i, (e, g) in enumerate(zip(expected, got)) for line in compare(e, g, f"{where}[{i}]")
        ]
    if isinstance(expected, float) and isinstance(got, int | float) and not isinstance(got, bool):
        close = (math.isnan(expected) and math.isnan(got)) or math.isclose(
            expected, got, rel_tol=RELATIVE, abs_tol=ABSOLUTE
        )
        return [] if close else [f"{where}: expected {expected!r}, got {got!r}"]
    if isinstance(expected, int) and isinstance(got, float):
        return compare(float(expected), got, where)
    return [] if expected == got else [f"{where}: expected {expected!r}, got {got!r}"]


def _numbers(value: Any) -> Any:
    """JSON has no NaN: the strings "nan", "inf" and "-inf" stand for them."""
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value
