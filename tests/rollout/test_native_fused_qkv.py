"""Weights side by side: one product gives what several gave, and everybody else finds their parameters as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strop.models.patches import PatchContext
from strop.models.projections.fused import FusedProjection, fused_forwards
from strop.rollout.native.borrowed_model import ROLLOUT_PATCHES
from tests.rollout import tiny

IDS = torch.arange(3, 15).view(2, 6)


def layers(bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(16, size, bias=bias) for size in (24, 8, 8)]


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_what_several_gave(bias):
    parts, states = layers(bias), torch.randn(5, 16)
    expected = [part(states) for part in parts]
    names = [part.state_dict() for part in parts]
    product = FusedProjection(parts)
    product.lay_out()
    torch.testing.assert_close(list(product(states)), expected)
    for part, before in zip(parts, names):
        assert all(torch.equal(value, before[name]) for name, value in part.state_dict().items())


def test_what_an_update_writes_is_seen_and_nothing_is_copied_again():
    parts, states = layers(), torch.randn(5, 16)
    product = FusedProjection(parts)
    product.lay_out()
    places = [part.weight.data_ptr() for part in parts]
    optimizer = torch.optim.SGD([weight for part in parts for weight in part.parameters()], lr=0.5)
    sum(part(states).square().mean() for part in parts).backward()
    optimizer.step()
    product.lay_out()
    assert [part.weight.data_ptr() for part in parts] == places
    torch.testing.assert_close(list(product(states)), [part(states) for part in parts])


def test_weights_that_moved_are_laid_out_anew():
    parts, states = layers(), torch.randn(5, 16)
    product = FusedProjection(parts)
    product.lay_out()
    for part in parts:  # as after a stay in host memory
        part.weight.data, part.bias.data = part.weight.data.clone(), part.bias.data.clone()
    parts[1].weight.data.mul_(2)
    product.lay_out()
    torch.testing.assert_close(list(product(states)), [part(states) for part in parts])


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_model_with_joined_products_is_the_same_model(kind):
    model = tiny.make(kind)
    with torch.no_grad():
        expected = model(IDS).logits
        found = list(fused_forwards(model))
        assert len(found) == 3 * model.config.num_hidden_layers
        patch = next(patch for patch in ROLLOUT_PATCHES if patch.name == "fused_qkv")
        changes = patch.apply(model, PatchContext())
        assert len(changes) == 4 * model.config.num_hidden_layers
        torch.testing.assert_close(model(IDS).logits, expected)
        products = [change._product for change in changes if hasattr(change, "_product")]
        assert not any(product.waiting for product in products), "nothing of a pass stays in memory"
        patch.undo(changes)
        assert torch.equal(model(IDS).logits, expected)


def test_adapters_hooks_and_shards_are_left_alone():
    model = tiny.make("llama")
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: None)
    model.model.layers[1].self_attn.v_proj.forward = lambda states: states
    assert not list(fused_forwards(model))
