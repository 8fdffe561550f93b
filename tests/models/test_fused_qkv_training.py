"""q, k and v as one product in training: the same outputs and gradients as three products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strop.models.changes import done, undo_changes
from strop.models.projections import fused
from strop.models.projections.fused import FusedQkvLinear, fused_forwards, fused_qkv_layers
from tests.rollout import tiny

IDS = torch.arange(3, 15).view(2, 6)


@pytest.fixture(autouse=True)
def _any_size_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "LONG", 8)


def logits_and_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(IDS).logits
    logits.log_softmax(-1).square().mean().backward()
    return logits, {
        name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None
    }


@pytest.mark.parametrize("adjacent", [False, True], ids=["apart", "side by side"])
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logits_and_gradients_are_those_of_three_products(kind: str, recompute: bool, adjacent: bool) -> None:
    model = tiny.make(kind).double().train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected, gradients = logits_and_gradients(model)
    if adjacent:
        for found in list(fused_forwards(model)):
            found.product.lay_out()
    changes = done(list(fused_qkv_layers(model)))
    attention = model.model.layers[0].self_attn
    assert [type(getattr(attention, name)) for name in fused.QKV] == [FusedQkvLinear] * 3
    logits, found = logits_and_gradients(model)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12, msg=name)
    assert not attention.q_proj.product._waiting and attention.q_proj.product._states is None
    undo_changes(changes)
    assert type(attention.q_proj) is nn.Linear and not hasattr(attention.q_proj, "product")


def test_frozen_weights_get_no_gradient_and_trained_ones_theirs() -> None:
    model = tiny.make("qwen2").double()
    model.model.layers[0].self_attn.k_proj.requires_grad_(False)
    _, gradients = logits_and_gradients(model)
    done(list(fused_qkv_layers(model)))
    _, found = logits_and_gradients(model)
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12, msg=name)


def test_calls_in_another_order_and_of_other_states_are_computed() -> None:
    model = tiny.make("llama").double()
    attention = model.model.layers[0].self_attn
    plain = copy.deepcopy(attention)
    done(list(fused_qkv_layers(model)))
    one, two = torch.randn(2, 3, attention.q_proj.in_features, dtype=torch.float64)
    for name, states in (("v_proj", one), ("q_proj", two), ("k_proj", one), ("k_proj", two), ("k_proj", two)):
        torch.testing.assert_close(getattr(attention, name)(states), getattr(plain, name)(states))


def test_the_values_do_not_keep_queries_and_keys_in_memory() -> None:
    model = tiny.make("llama")
    done(list(fused_qkv_layers(model)))
    attention = model.model.layers[0].self_attn
    states = torch.randn(5, attention.q_proj.in_features)
    attention.q_proj(states)
    attention.k_proj(states)
    values = attention.v_proj(states)
    assert values.untyped_storage().nbytes() == values.numel() * values.element_size()


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = tiny.make("llama").double()
    done(list(fused_qkv_layers(model)))
    twin = copy.deepcopy(model)
    before = model(IDS).logits
    with torch.no_grad():
        for part in model.model.layers[0].self_attn.parameters():
            part.zero_()
    torch.testing.assert_close(twin(IDS).logits, before, rtol=0, atol=0)


def test_short_inputs_keep_three_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "LONG", 4096)
    assert not list(fused_qkv_layers(tiny.make("llama")))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "q", "kv"), [(2048, 2048, 256), (2560, 4096, 1024), (3584, 3584, 512), (4096, 4096, 1024)]
)
def test_a_token_has_the_same_bits_in_any_number_of_rows(width: int, q: int, kv: int) -> None:
    torch.manual_seed(0)
    part = nn.Module()
    for name, size in zip(fused.QKV, (q, kv, kv), strict=True):
        setattr(part, name, nn.Linear(width, size, device="cuda", dtype=torch.bfloat16))
    done(list(fused_qkv_layers(part)))
    states = torch.randn(6000, width, device="cuda", dtype=torch.bfloat16)
    layers = [getattr(part, name) for name in fused.QKV]
    together = torch.cat([layer(states) for layer in layers], 1)
    for count in (1, 2, 7, 16, 33, 64, 160, 256, 300, 384, 512, 640, 700, 1024, 2048, 4096):
        some = torch.randperm(6000, device="cuda")[:count]
        rows = states[some]
        assert torch.equal(torch.cat([layer(rows) for layer in layers], 1), together[some]), count
