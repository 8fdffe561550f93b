"""Residual sums inside products: the same numbers, one rounding less, and only where the code is known."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from strop.models.checkpointing import checkpoint_activations
from strop.models.lora import add_adapters
from strop.models.patches import DEVICE_PATCHES, PatchContext
from strop.models.residual import AddingLinear, widen_residual

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
IDS = torch.arange(2, 26).view(2, 12)


def make(kind, **more):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **more))


def learned(model):
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.float().square().mean().backward()
    return [logits.detach(), *(weight.grad.clone() for weight in model.parameters())]


def fuse_residual(model):
    patch = next(patch for patch in DEVICE_PATCHES if patch.name == "residual_add")
    return patch.apply(model, PatchContext())


def adding(model):
    return sum(type(part) is AddingLinear for part in model.modules())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
def test_a_fused_model_learns_the_same(kind):
    model = make(kind)
    expected, names = learned(model), list(model.state_dict())
    fuse_residual(model)
    assert adding(model) == 6 and list(model.state_dict()) == names
    torch.testing.assert_close(learned(model), expected, rtol=1e-5, atol=1e-6)
    fuse_residual(model)
    assert adding(model) == 6, "a second time changes nothing"
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    torch.testing.assert_close(learned(twin), expected, rtol=1e-5, atol=1e-6)


def test_checkpointed_layers_are_fused_too():
    model = make("llama")
    expected = learned(model)
    fuse_residual(model)
    checkpoint_activations(model)
    model.train()
    torch.testing.assert_close(learned(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:mkldnn")
def test_a_wide_stream_is_rounded_less():
    """What the branches say reaches a float32 stream without a stop at 16 bits."""
    model = make("llama")
    for weight in model.parameters():
        weight.data = 3 * weight.data.bfloat16().float()
    exact = learned(model)
    narrow, fused = (copy.deepcopy(model).bfloat16() for _ in range(2))
    assert widen_residual(narrow) and widen_residual(fused)
    fuse_residual(fused)
    far, near = learned(narrow), learned(fused)
    assert near[0].dtype == far[0].dtype
    assert (near[0] - exact[0]).abs().mean() < 0.95 * (far[0] - exact[0]).abs().mean()
    off, usual = (
        sum(
            float((gradient - wanted).norm() / wanted.norm())
            for gradient, wanted in zip(found[1:], exact[1:])
        )
        for found in (near, far)
    )
    assert off < 1.05 * usual


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.filterwarnings("ignore:mkldnn")
def test_without_gradients_sums_take_the_place_of_what_they_add_to(wide):
    model = make("llama")
    if wide:
        assert widen_residual(model.bfloat16())
    fuse_residual(model)
    embeddings = model.model.embed_tokens(IDS).detach()
    given = embeddings.clone()
    expected = model(inputs_embeds=embeddings, use_cache=False).logits
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=embeddings, use_cache=False).logits, expected)
        assert torch.equal(embeddings, given), "what comes from outside is not the layer's to write over"
        stream, end = torch.randn(3, 32), model.model.layers[0].mlp.down_proj
        states = torch.randn(3, 56, dtype=end.weight.dtype)
        end.stream = stream
        sums = end(states)
        assert sums.data_ptr() == stream.data_ptr()
        for part in model.modules():
            if isinstance(part, AddingLinear):
                part.overwrites = True
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, expected)


def test_what_is_written_otherwise_is_left_alone():
    scaled = make("granite", residual_multiplier=0.2)
    fuse_residual(scaled)
    adapted = add_adapters(make("llama"), rank=2, alpha=4)
    fuse_residual(adapted)
    biased = make("llama", attention_bias=True)
    fuse_residual(biased)
    assert adding(scaled) == adding(adapted) == adding(biased) == 0


def test_alone_it_is_a_plain_layer():
    layer, states = nn.Linear(8, 4, bias=False), torch.randn(3, 8)
    expected = layer(states)
    layer.__class__ = AddingLinear
    assert torch.equal(layer(states), expected)
    layer.stream = torch.ones(3, 4)
    torch.testing.assert_close(layer(states), expected + 1)
    assert torch.equal(layer(states), expected), "a stream is added to once"
