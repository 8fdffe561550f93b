"""The native engine refuses models from which it would sample other tokens than training recomputes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from strop.rollout.base import build_engine
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native_check import measure_sampling
from tests.models.tiny import SIZE, tiny_model


def test_a_model_that_it_samples_right_is_taken() -> None:
    model = tiny_model()
    assert isinstance(build_engine("native", model), NativeEngine)
    measured = measure_sampling(model)
    assert measured.difference is not None and measured.difference < 1e-5


def test_a_model_that_it_samples_wrong_is_refused_with_the_number() -> None:
    """DiffLlama subtracts two halves of its values after attention, which needs both of them in the cache."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("diffllama", **SIZE))
    with pytest.raises(
        ValueError, match=r"DiffLlama.*differ by up to [\d.]+ from recomputed.*rollout\.name=hf"
    ):
        build_engine("native", model)


def test_a_model_that_it_cannot_run_is_refused_with_the_reason() -> None:
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", n_head=4, n_layer=2, hidden_size=32)
    )
    with pytest.raises(ValueError, match=r"Bloom.*cannot be exchanged.*rollout\.name=hf"):
        build_engine("native", model)


def test_a_model_that_cannot_be_made_small_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()

    model.model.layers[0].other = nn.GRU(4, 4)
    build_engine("native", model)
    assert "is not measured" in caplog.text
