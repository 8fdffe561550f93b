"""Which layouts are right is measured: on a small model of the same class, or on the model itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from strop.models.build import meta_init
from strop.models.heads import new_scalar_model
from strop.models.layouts import check
from strop.models.layouts.check import TOLERANCE, layouts_of, measure_layouts, packing_obstacle, runs_packed
from tests.models.tiny import SIZE, tiny_model


class _Mixing(nn.Module):
    """Adds to each token the one before it in the row, whichever sequence that is of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden + hidden.roll(1, dims=1) * (torch.arange(hidden.shape[1]) > 0)[:, None])


class MixingForCausalLM(LlamaForCausalLM):
    """A class of which no list can know: its name, its configuration and its parts look like Llama's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layer = self.model.layers[0]
        layer.mlp = _Mixing(layer.mlp)


def mixing() -> Any:
    return MixingForCausalLM(AutoConfig.for_model("llama", **SIZE)).eval()


def test_a_model_that_mixes_neighbours_runs_padded_with_the_number_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check._log_padded.cache_clear()
    model = mixing()
    layouts = layouts_of(model)
    assert layouts.packed.difference is not None and layouts.packed.difference > 0.01
    assert layouts.padded.right
    with caplog.at_level(logging.INFO, "strop"):
        assert not runs_packed(model, True) and not runs_packed(model, True)
    assert caplog.text.count("runs with padded rows") == 1
    assert f"log-probs differ by up to {layouts.packed.difference:.2g}" in caplog.text
    with pytest.raises(ValueError, match=r"differ by up to .*ulysses_sequence_parallel_size=1"):
        runs_packed(model, True, sequence_parallel=True)


def test_a_model_whose_parts_were_exchanged_is_measured_itself() -> None:
    model = tiny_model()
    assert packing_obstacle(model) is None
    other = tiny_model()
    other.model.layers[0].mlp = _Mixing(other.model.layers[0].mlp)
    assert "log-probs differ" in (packing_obstacle(other) or "")
    assert packing_obstacle(tiny_model(seed=1)) is None, "what was measured on one is not said of another"


def test_weights_on_the_meta_device_are_not_needed() -> None:
    with meta_init():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZE))
    assert model.lm_head.weight.is_meta and runs_packed(model, True)
    with meta_init():
        other = mixing()
        other.model.layers[0].extra = nn.GRU(4, 4)
    assert "could not be measured" in (packing_obstacle(other) or "")
    assert not runs_packed(other, True)


def test_a_class_and_configuration_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def counted(model: Any) -> check.Layouts:
        found.append(model)
        return measure_layouts(model)

    monkeypatch.setattr(check, "measure_layouts", counted)
    monkeypatch.setattr(check, "_by_class", {})
    for seed in range(3):
        layouts_of(tiny_model(seed=seed))
    layouts_of(tiny_model("llama", attention_bias=True))
    assert len(found) == 2


def test_a_model_that_looks_ahead_is_refused_for_language_and_may_score() -> None:
    sizes = {**SIZE, "type_vocab_size": 2}
    config = AutoConfig.for_model("bert", **sizes)
    model: Any = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"later tokens change log-probs .* by up to .*is_decoder"):
        runs_packed(model, True)
    decoder: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", is_decoder=True, **sizes))
    assert layouts_of(decoder).padded.right


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_models_with_a_scalar_head_are_measured(family: str) -> None:
    layouts = layouts_of(new_scalar_model(tiny_model(family).config))
    assert layouts.packed.difference is not None and layouts.packed.difference < TOLERANCE


def test_measuring_changes_nothing() -> None:
    model = tiny_model().train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = torch.random.get_rng_state()
    layouts_of(model)
    measure_layouts(model)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert torch.equal(state, torch.random.get_rng_state())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name
