"""LoRA layers on a CPU: the numbers and gradients of peft, wherever peft has more to do its own forward."""

from __future__ import annotations

import pytest
import torch

from strop.models.lora import adapted_layers, add_adapter
from strop.models.patches import applied_patches, patch_for_device, undo_patches
from tests.models.test_lora_gpu import adapted

IDS = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])


def numbers(model):
    """Logits, and the gradients of all adapters."""
    model.zero_grad()
    logits = model(IDS).logits
    logits.square().mean().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return logits.detach(), gradients


@pytest.mark.parametrize("nf4", [False, True])
def test_numbers_and_gradients_are_those_of_peft(nf4):
    model = adapted(nf4)
    expected, gradients = numbers(model)
    kinds = [type(layer) for layer in adapted_layers(model)]
    names = list(model.state_dict())
    patch_for_device(model)
    assert "lora_linear" in applied_patches(model)
    assert all(type(layer).adds_in_product for layer in adapted_layers(model))
    assert list(model.state_dict()) == names
    found, ours = numbers(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert ours.keys() == gradients.keys() and len(ours) == 2 * len(kinds)
    for name in ours:
        torch.testing.assert_close(ours[name], gradients[name], rtol=1e-4, atol=1e-7)
    with torch.no_grad():  # in place
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-6)
    undo_patches(model)
    assert [type(layer) for layer in adapted_layers(model)] == kinds


def test_layers_that_are_not_plain_compute_as_in_peft():
    model = adapted()
    add_adapter(model, "second", rank=4, alpha=8, seed=1)
    patch_for_device(model)
    layers = adapted_layers(model)
    for layer in layers:
        torch.nn.init.normal_(layer.lora_B["second"].weight, std=0.05)

    def both():
        found = model(IDS).logits
        patched = [type(layer) for layer in layers]
        undo_patches(model)
        expected = model(IDS).logits
        for layer, kind in zip(layers, patched, strict=True):
            layer.__class__ = kind
        patch_for_device(model)
        return found, expected

    with model.disable_adapter():
        off, plain = both()
    assert torch.equal(off, plain)
    for layer in layers:
        layer._active_adapter = ["default", "second"]
    two, expected = both()
    assert torch.equal(two, expected) and not torch.equal(two, off)
    for layer in layers:
        layer._active_adapter = ["second"]
    hooks = [
        layer.lora_B["second"].register_forward_hook(lambda part, inputs, out: out.zero_())
        for layer in layers
    ]
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, off)  # as the engine leaves an adapter out of rows
    for hook in hooks:
        hook.remove()
    one, expected = both()
    torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        narrow, expected = both()
    assert torch.equal(narrow, expected)
