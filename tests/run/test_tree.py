"""Trees survive the way through JSON and tensors: values, types, dtypes, bits."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.run.checkpoint.tensor_files import DTYPES, copy_to_host, join, read_tensors, split, write_tensors


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and bits."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(
                a.detach().contiguous().reshape(-1).view(torch.uint8),
                b.contiguous().reshape(-1).view(torch.uint8),
            )
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and [type(k) for k in a] == [type(k) for k in b]
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def through_json(tree: Any) -> Any:
    plain, tensors = split(tree)
    return join(json.loads(json.dumps(plain, allow_nan=False)), tensors)


tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)
keys = st.one_of(
    st.text(max_size=4),
    st.sampled_from(["$tensor", "$tuple", "a.b", "a"]),
    st.integers(),
    st.none(),
    st.booleans(),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.integers(2**100, 2**130),
    tensors,
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(trees)
def test_any_tree_comes_back(tree: Any) -> None:
    assert same(tree, through_json(tree))


def test_every_dtype_keeps_its_bits_through_a_file(tmp_path: Any) -> None:
    noise = torch.randint(0, 256, (24, 16), dtype=torch.uint8)
    saved = {str(dtype): (noise % 2 == 0 if dtype == torch.bool else noise.view(dtype)) for dtype in DTYPES}
    saved |= {
        "scalar": torch.tensor(-0.0),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }
    write_tensors(tmp_path / "x.safetensors", saved)
    loaded = read_tensors(tmp_path / "x.safetensors")
    assert loaded.keys() == saved.keys()
    assert all(same(saved[name], loaded[name]) for name in saved)
    (tmp_path / "x.safetensors").write_bytes(b"")
    assert all(same(saved[name], loaded[name]) for name in saved), "the loaded tensors still live in the file"


def test_an_empty_array_of_numpy_is_written(tmp_path: Any) -> None:
    empty = torch.from_numpy(np.array([], np.int64))
    write_tensors(tmp_path / "t.safetensors", {"empty": empty, "more": torch.ones(2)})
    found = read_tensors(tmp_path / "t.safetensors")
    assert found["empty"].dtype == torch.int64 and found["empty"].shape == (0,)
    assert torch.equal(found["more"], torch.ones(2))


def test_names_of_tensors_are_their_places_and_never_clash() -> None:
    _, tensors = split({"layer.0": {"weight": torch.ones(1)}, "layer": [{"weight": torch.zeros(1)}]})
    assert set(tensors) == {"layer.0.weight", "layer.0.weight#2"}


def test_tied_weights_are_stored_once() -> None:
    weight = torch.nn.Parameter(torch.rand(4, 4))
    plain, tensors = split({"embed": weight, "head": weight, "part": weight[:2]})
    assert list(tensors) == ["embed", "part"]
    back = join(plain, tensors)
    assert back["head"] is back["embed"] and same(back["part"], weight[:2])


def test_copies_are_cut_off_from_training() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    copies = copy_to_host({"w": weight})
    with torch.no_grad():
        weight.add_(1)
    assert copies["w"].tolist() == [0, 0, 0] and not copies["w"].requires_grad


def test_ordered_dicts_become_dicts() -> None:
    assert same(through_json(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"actor/extra: a\.1 is a builtins\.object, which a checkpoint cannot hold"),
        (b"bytes", r"builtins\.bytes"),
        (namedtuple("Point", "x")(1), "Point"),
        (torch.eye(2).to_sparse(), "gather it first"),
        (torch.empty(2, device="meta"), "gather it first"),
        (torch.zeros(1, dtype=torch.complex128), "complex128, which safetensors cannot hold"),
    ],
)
def test_what_cannot_be_held_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split({"a": [0, value]}, name="actor/extra")


def test_marks_of_the_future_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'\$quaternion' is not known"):
        join({"$quaternion": 1}, {})
