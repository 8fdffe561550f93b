"""Products of all experts of a rank in one call."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

from strop.backends.megatron.layers import gated_silu, grouped_products, home_of
from strop.models.heads import new_scalar_model
from tests.models.tiny import tiny_model


@pytest.mark.parametrize(("inner", "outer"), [(8, 16), (6, 5)], ids=["aligned", "by-expert"])
@pytest.mark.parametrize("counts", [[3, 0, 4, 2], [0, 0, 0, 9], [0, 0, 0, 0]])
def test_every_row_is_multiplied_with_the_weight_of_its_expert(inner, outer, counts):
    states = torch.randn(sum(counts), inner, requires_grad=True)
    weights = torch.randn(4, outer, inner, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    found = grouped_products(states, weights, ends)
    rows = states.split(counts)
    expected = torch.cat([F.linear(row, weight) for row, weight in zip(rows, weights, strict=True)])
    torch.testing.assert_close(found, expected)
    above = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad(out, [states, weights], above) for out in (found, expected))):
        torch.testing.assert_close(one, other)


def test_the_gate_is_silu():
    both = torch.randn(5, 16)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(gated_silu(both), F.silu(gate) * up)


@pytest.mark.parametrize(
    "build", [tiny_model, lambda: new_scalar_model(tiny_model().config)], ids=["language", "scalar"]
)
def test_the_rotary_function_is_that_of_the_layers(build):
    assert home_of(build()) is modeling_llama
