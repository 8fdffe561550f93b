"""Gradient checkpointing: what each mode keeps and computes again. tests/backends/test_conformance.py compares
gradients."""

from __future__ import annotations

import pytest
import torch

from strop.config.checkpointing import checkpointing_of
from strop.config.schema.model import ModelConfig
from strop.models.changes import undo_changes
from strop.models.checkpointing import checkpoint_activations, checkpointed_layers, keep_small
from strop.models.forward import response_outputs
from strop.models.patches import PatchContext, _residual_add
from tests.models.tiny import tiny_batch, tiny_model


def calls_of(model) -> dict[str, int]:
    """Calls of each part of the first layer in a forward and a backward pass."""
    counts = dict.fromkeys(("self_attn", "mlp", "input_layernorm"), 0)
    handles = []
    for name in counts:

        def count(*_, name=name) -> None:
            counts[name] += 1

        handles.append(getattr(model.model.layers[0], name).register_forward_pre_hook(count))
    inner = model.model.layers[0].mlp.gate_proj
    counts["gate_proj"] = 0

    def count_inner(*_) -> None:
        counts["gate_proj"] += 1

    handles.append(inner.register_forward_pre_hook(count_inner))
    outputs = response_outputs(model.train(), tiny_batch(), ["log_probs"])
    outputs["log_probs"].sum().backward()
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize(
    ("mode", "attention", "inner"), [("none", 1, 1), ("full", 2, 2), ("selective", 1, 2)]
)
def test_what_is_computed_again(mode, attention, inner):
    model = tiny_model()
    checkpoint_activations(model, mode)
    counts = calls_of(model)
    assert (counts["self_attn"], counts["gate_proj"]) == (attention, inner)
    assert "forward" not in vars(model.model.layers[0].mlp)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_products_that_add_to_the_stream_find_it_again(mode):
    """The layer sets the stream outside of the part that is computed again."""
    gradients = []
    for chosen in ("none", mode):
        model = tiny_model()
        changes = _residual_add(model, PatchContext())
        assert changes
        checkpoint_activations(model, chosen)
        response_outputs(model.train(), tiny_batch(), ["log_probs"])["log_probs"].sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert not any("stream" in vars(part) for part in model.modules()), "nothing is kept alive"
        undo_changes(changes)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_small_pass_computes_nothing_again():
    """Two layers of 8 tokens keep as much as one layer computes again for 16."""
    model = tiny_model()
    checkpoint_activations(model, "full")
    layers = checkpointed_layers(model)
    limit = 8 * len(layers)
    found = []
    for tokens in (8, 9):
        with keep_small(layers, tokens, limit):
            found.append(calls_of(model)["self_attn"])
    assert found == [1, 2] and checkpointed_layers(model) == layers


def test_a_model_without_it_says_what_to_set(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(model, "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match=r"Set model\.enable_gradient_checkpointing=false"):
        checkpoint_activations(model)


def test_disabled_it_is_gone_and_without_gradients_it_does_nothing():
    model = tiny_model()
    checkpoint_activations(model, "selective")
    assert len(checkpointed_layers(model)) == 2
    model.gradient_checkpointing_disable()
    assert calls_of(model)["gate_proj"] == 1 and checkpointed_layers(model) == []


def test_layers_without_a_known_part_are_computed_again_as_a_whole(caplog):
    model = tiny_model()
    for layer in model.model.layers:
        layer.inner = layer.mlp
        del layer.mlp
    checkpoint_activations(model, "selective")
    assert "0 of 2 layers of LlamaForCausalLM have a part called mlp" in caplog.text


@pytest.mark.parametrize(
    ("enable", "choice", "mode"),
    [
        (True, None, "full"),
        (False, None, "none"),
        (True, "selective", "selective"),
        (True, "none", "none"),
        (False, "full", "full"),
    ],
)
def test_the_choice_and_the_older_switch(enable, choice, mode):
    model = ModelConfig(path="m", enable_gradient_checkpointing=enable, gradient_checkpointing=choice)
    assert checkpointing_of(model) == mode
