"""Sequences of a packed row beside the formula: longer than the slices in which a CPU attends, and in one kernel as on a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.models import varlen
from strop.models.attention import _SLICE, packed_attention
from strop.models.packing import lay_out, rectangle

HEADS, KEYS, SIZE = 6, 2, 8
LENGTHS = (3 * _SLICE + 7, 2 * _SLICE + 30, _SLICE + 40, _SLICE // 2, 1)


def attended(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One sequence, [L, heads, D]: softmax over the keys that a query sees."""
    k, v = (tensor.repeat_interleave(HEADS // KEYS, dim=1) for tensor in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * SIZE**-0.5
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (distance >= 0) & (distance < (window or len(q)))
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def drawn(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((HEADS, count), (KEYS, count), (KEYS, count))
    return [
        torch.randn(1, heads, n, SIZE, dtype=torch.float64, generator=draw).requires_grad_()
        for heads, n in shapes
    ]


def in_one_kernel(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, *, scale: None, window: int | None
) -> Tensor:
    """Called as the kernels of a GPU are."""
    assert longest == int(bounds.diff().max()) and scale is None
    return torch.cat([attended(q[a:b], k[a:b], v[a:b], window) for a, b in pairwise(bounds.tolist())])


@pytest.mark.parametrize("kernel", [None, in_one_kernel], ids=["slices", "kernel"])
@pytest.mark.parametrize("shared", [0, _SLICE + 20])
@pytest.mark.parametrize("window", [None, 1, _SLICE - 1, 2 * _SLICE])
def test_all_see_what_the_formula_says(
    monkeypatch: pytest.MonkeyPatch, window: int | None, shared: int, kernel: Any
) -> None:
    monkeypatch.setattr(varlen, "DEVICES", ("cpu",))
    monkeypatch.setattr(varlen, "varlen_kernel", lambda *_: kernel)
    lengths = [length for length in LENGTHS if length > shared]
    beginning = torch.arange(shared)
    ids = [
        torch.cat([beginning, 1000 * (i + 1) + torch.arange(length - shared)])
        for i, length in enumerate(lengths)
    ]
    inputs = lay_out(rectangle(ids), packed=True)
    assert inputs.packing is not None
    states = drawn(inputs.ids.shape[1])
    found, _ = packed_attention(
        torch.nn.Module(), *states, None, packing=inputs.packing, sliding_window=window
    )
    rows = [row[row >= 0] for row in inputs.places]
    expected = [attended(*(tensor[0].transpose(0, 1)[row] for tensor in states), window) for row in rows]
    for row, one in zip(rows, expected, strict=True):
        torch.testing.assert_close(found[0][row], one)
    above = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    # A shared token is attended once: its gradient comes through the first sequence that has it, and as a key through all.
    firsts = [
        row >= (0 if before is None else shared)
        for before, row in pairwise([None, *map(torch.arange, lengths)])
    ]
    total = sum(
        (one * above[0][row])[first].sum() for one, row, first in zip(expected, rows, firsts, strict=True)
    )
    wanted = torch.autograd.grad(total, states)
    for one, other in zip(torch.autograd.grad(found, states, above), wanted, strict=True):
        torch.testing.assert_close(one, other)
