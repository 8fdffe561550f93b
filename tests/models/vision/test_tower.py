"""Towers of the Qwen-VL families: all images in one call give the numbers of transformers' call per image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from strop.models.changes import done, undo_changes
from strop.models.patches import applied_patches, patch_for_device, undo_patches
from strop.models.projections.divided import DividedLinear
from strop.models.vision import tower
from strop.models.vision.passes import towers_of, vision_part
from tests.models.vision.test_stream import log_probs
from tests.models.vision.tiny_vlm import FAMILIES, tiny_vlm

GRID = torch.tensor([[1, 4, 4], [1, 6, 4], [1, 10, 6], [1, 4, 4], [2, 4, 6]])
"""Windows of 4 x 4 patches of Qwen2.5-VL: whole ones, and smaller ones at the borders."""
PIXELS = torch.randn(int(GRID.prod(1).sum()), 96, generator=torch.Generator().manual_seed(1))


def features(model: PreTrainedModel) -> tuple[list[Tensor], int]:
    """Features, gradients of all weights of the tower, and calls of the attention function."""
    (module,) = towers_of(model)
    calls = 0
    own = F.scaled_dot_product_attention

    def counted(*arguments: Tensor, **options: object) -> Tensor:
        nonlocal calls
        calls += 1
        return own(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", counted)
        found = module(PIXELS, grid_thw=GRID).pooler_output
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad((found * weight).sum(), trained, materialize_grads=True)
    return [found.detach(), *gradients], calls


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_all_images_in_one_call_are_each_image_alone(family: str) -> None:
    model = tiny_vlm(family)
    expected, before = features(model)
    patch_for_device(model)
    assert "tower" in applied_patches(model)
    found, calls = features(model)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5 * float(one.abs().max()))
    assert calls < before and calls <= 4 * 3, "at most one call per layer and length"
    undo_patches(model)
    again, after = features(model)
    assert after == before
    assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))


def test_a_text_model_and_other_towers_are_left_alone() -> None:
    model = tiny_vlm("llava")
    patch_for_device(model)
    assert "tower" not in applied_patches(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_long_products_outside_of_the_language_model_are_divided(family: str) -> None:
    """On a GPU; here with a smaller limit, and the numbers of a plain layer."""
    model = tiny_vlm(family)
    part = vision_part(model).module
    expected = log_probs(model, family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tower, "LONG", 16)
        changes = done(tower.divided_products(part))
    divided = {name for name, module in part.named_modules() if isinstance(module, DividedLinear)}
    language = {name for name in divided if name.startswith(("language_model", "text_model"))}
    (module,) = towers_of(model)
    inside = [one for one in module.modules() if isinstance(one, nn.Linear) and one.in_features >= 16]
    assert divided and not language and all(isinstance(one, DividedLinear) for one in inside)
    assert torch.equal(log_probs(model, family), expected)
    undo_changes(changes)
    assert not any(isinstance(one, DividedLinear) for one in model.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 72, 80])
def test_the_kernel_of_a_gpu_passes_its_check(size: int) -> None:
    """Heads of Qwen3-VL (64, 72) and Qwen2.5-VL (80)."""
    device = torch.device("cuda", torch.cuda.current_device())
    tower._check_kernel(device, torch.bfloat16, size)
    assert tower._kernels[device, torch.bfloat16, size] is not None
