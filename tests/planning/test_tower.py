"""Weights of vision towers against real modules."""

from __future__ import annotations

import pytest

from strop.planning.shape import read_shape
from tests.models.vision.tiny_vlm import tiny_vlm


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_every_weight_is_counted(family: str) -> None:
    model = tiny_vlm(family)
    shape = read_shape(model.config.to_dict())
    assert shape.tower == sum(weight.numel() for weight in model.model.visual.parameters())
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
