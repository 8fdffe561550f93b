"""Decode steps of Mamba layers in 16 bits have the numbers of a pass over the whole row."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.models.layouts.mixers import mixers_of
from strop.models.patches import choose_patches, sampling_patches
from strop.rollout.base import Request, Sampling
from strop.rollout.native.engine import NativeEngine
from tests.models.hybrids import hybrid

_attend = F.scaled_dot_product_attention


def exact_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """On a CPU the order of the sums of attention depends on the number of queries. On a GPU it does not."""
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        options["attn_mask"] = mask.double()
    return _attend(q.double(), k.double(), v.double(), **options).to(q.dtype)


def largest_difference(family: str, chosen: str) -> tuple[float, Any]:
    """Of sampled and recomputed log-probs, in bf16."""
    model = hybrid(family).to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(0.25)
    choose_patches(model, chosen)
    prompts = [[(7 * i * i + 3 * i + s) % 55 + 3 for i in range(20 + 5 * s)] for s in range(3)]
    requests = [Request(ids, n=2, seed=s) for s, ids in enumerate(prompts)]
    answers = NativeEngine(model).generate(requests, Sampling(max_tokens=16, ignore_eos=True))
    largest = 0.0
    for request, group in zip(requests, answers, strict=True):
        for answer in group:
            ids = torch.tensor([[*request.ids, *answer.ids]])
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, len(request.ids) - 1 : -1].float()
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer.ids)[:, None])[:, 0]
            largest = max(largest, float((expected - torch.tensor(answer.log_probs)).abs().max()))
    return largest, model


@pytest.mark.parametrize("family", ["falcon_h1", "granitemoehybrid", "mamba2", "falcon_mamba"])
def test_sampled_log_probs_in_bf16_are_those_of_training(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", exact_attention)
    found, model = largest_difference(family, "auto")
    assert "state_precision" in sampling_patches(model)
    assert found < 1e-4
    without, model = largest_difference(family, "off")
    assert "state_precision" not in sampling_patches(model)
    assert without > 10 * found, "otherwise the patch is for nothing"


def test_the_functions_of_transformers_come_back() -> None:
    model = hybrid("mamba2").to(torch.bfloat16)
    home = sys.modules[type(mixers_of(model)[0]).__module__]
    before = vars(home)["mamba2_selective_state_update"]
    engine, other = NativeEngine(model), NativeEngine(hybrid("mamba2").to(torch.bfloat16))
    with engine.borrowed_model():
        with other.borrowed_model():
            assert vars(home)["mamba2_selective_state_update"] is not before
        assert vars(home)["mamba2_selective_state_update"] is not before, "one engine still samples"
    assert vars(home)["mamba2_selective_state_update"] is before
    wide = NativeEngine(hybrid("mamba2"))
    with wide.borrowed_model():
        assert vars(home)["mamba2_selective_state_update"] is before, "float32 needs no patch"
