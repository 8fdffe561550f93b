"""The residual stream of a model with images: float32 in the language part, the tower is left alone, and the
products that end a branch add to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from strop.models.forward import response_outputs
from strop.models.patches import DEVICE_PATCHES, PatchContext
from strop.models.residual import AddingLinear, widen_residual
from strop.models.vision.passes import towers_of
from tests.models.vision.test_passes import batch_of_rows, rows_of
from tests.models.vision.tiny_vlm import FAMILIES, tiny_vlm


def log_probs(model: nn.Module, family: str) -> Tensor:
    with torch.no_grad():
        found: Tensor = response_outputs(model, batch_of_rows(rows_of(family)), ["log_probs"])["log_probs"]
    return found.float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:mkldnn")
def test_the_stream_of_the_language_part_is_wide(family: str) -> None:
    """Towers with torch's LayerNorm, and angles of a tower that are computed in float32, change nothing."""
    exact = log_probs(tiny_vlm(family).bfloat16().float(), family)
    model = tiny_vlm(family).bfloat16()
    assert widen_residual(model)
    (tower,) = towers_of(model)
    assert not any(part._forward_hooks for part in tower.modules())
    seen: list[torch.dtype] = []
    for name, part in model.named_modules():
        if name.endswith("input_layernorm"):
            part.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    found = log_probs(model, family)
    assert seen == [torch.float32] * 2, "the stream that enters each layer"
    assert (found - exact).abs().mean() < 0.02


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "smolvlm"])
def test_branches_add_to_the_stream_inside_their_products(family: str) -> None:
    model = tiny_vlm(family)
    expected = log_probs(model, family)
    patch = next(patch for patch in DEVICE_PATCHES if patch.name == "residual_add")
    patch.apply(model, PatchContext())
    assert sum(type(part) is AddingLinear for part in model.modules()) == 4, "two in each of two layers"
    torch.testing.assert_close(log_probs(model, family), expected, rtol=0, atol=1e-5)
