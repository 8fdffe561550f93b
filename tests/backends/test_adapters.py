"""Switching between the adapters of a backend."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from strop.backends.adapters import AdapterSet
from strop.backends.base import BackendSettings
from strop.backends.single import SingleBackend
from strop.config.schema.model import OptimConfig
from strop.models.lora import activate_adapter, adapted_layers, add_adapters
from tests.models.tiny import tiny_model

NAMES = ["default", "second", "third"]


def backend(dropout: float = 0.0) -> tuple[SingleBackend, AdapterSet]:
    adapted = add_adapters(tiny_model(), rank=2, alpha=4, dropout=dropout, target_modules="all-linear")
    made = SingleBackend(adapted, BackendSettings(optim=OptimConfig()))
    adapters = AdapterSet(made)
    for name in NAMES[1:]:
        adapters.add(name, rank=3, alpha=4, seed=1)
    return made, adapters


def state(module: nn.Module) -> dict[str, object]:
    """What decides about the adapter that computes, and about the weights that are trained."""
    found: dict[str, object] = {name: weight.requires_grad for name, weight in module.named_parameters()}
    for index, layer in enumerate(adapted_layers(module)):
        found[f"layer {index}"] = layer.active_adapters
    whole: Any = module
    found["model"] = (whole.active_adapters, whole.base_model.active_adapters)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_activated_as_peft_activates_it(name: str) -> None:
    made, adapters = backend()
    for before in ("third", "second", name):
        adapters.activate(before)
    ours = state(made.module)
    activate_adapter(made.module, name)
    assert ours == state(made.module)
    assert sum(weight.requires_grad for weight in made.module.parameters()) == len(made.weights.parameters)


def test_a_new_adapter_has_the_mode_of_the_model() -> None:
    """Dropout of an adapter that is added between two passes must not be active in a pass without it."""
    made, adapters = backend(dropout=0.5)
    made._set_mode(training=False)
    adapters.add("late", rank=2, alpha=4, seed=1)
    made._set_mode(training=False)
    assert not any(part.training for part in made.module.modules())
    made._set_mode(training=True)
    assert all(part.training for part in made.module.modules())


def test_the_mode_is_set_again_after_the_owner_of_the_model_changed_it() -> None:
    made, _ = backend()
    made._set_mode(training=True)
    made.module.eval()
    made._set_mode(training=True)
    assert all(part.training for part in made.module.modules())
