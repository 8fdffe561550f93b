"""Mixers (linear attention, state spaces, short convolutions) keep the sequences of a packed row apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.models.build import checkpoint_activations
from strop.models.forward import response_outputs
from strop.models.heads import new_scalar_model
from strop.models.layouts.check import runs_packed
from strop.models.layouts.mixers import prepare_mixers
from strop.models.lora import add_adapters
from strop.types import Batch
from tests.models.hybrids import STATEFUL, hybrid
from tests.models.tiny import tiny_batch, tiny_model

PACKED = list(STATEFUL)


def shared_batch() -> Batch:
    """Sequences of which three share their prompts."""
    batch = tiny_batch([(7, 5), (7, 2), (1, 9), (7, 3), (12, 6)])
    for row in (1, 3):
        batch.sequences[row][:7] = batch.sequences[0][:7]
    return batch


def gradients(model: Any, batch: Batch, packed: bool) -> Tensor:
    model.zero_grad()
    found = response_outputs(model, batch, ["log_probs"], packed=packed)["log_probs"]
    (found * batch.advantages * batch.mask).sum().backward()
    parts = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    joined: Tensor = torch.cat(parts)
    return joined


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    "family", ["lfm2", "qwen3_5_text", "falcon_h1", "kimi_linear", "mamba", "falcon_mamba"]
)
def test_gradients_are_those_of_padded_rows(family: str, checkpointed: bool) -> None:
    model = hybrid(family).train()
    if checkpointed:
        checkpoint_activations(model)
    batch = shared_batch()
    assert runs_packed(model, True)
    expected = gradients(model, batch, packed=False)
    found = gradients(model, batch, packed=True)
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=1e-4, atol=2e-6)


def test_a_pass_between_forward_and_backward_does_not_change_the_layout() -> None:
    """With checkpointing, the layers run again in the backward pass."""
    model = hybrid("lfm2").train()
    checkpoint_activations(model)
    batch = shared_batch()
    assert runs_packed(model, True)
    expected = gradients(model, batch, packed=True)
    model.zero_grad()
    found = response_outputs(model, batch, ["log_probs"])["log_probs"]
    response_outputs(model, tiny_batch([(2, 9), (5, 5), (3, 3)]), ["log_probs"])
    (found * batch.advantages * batch.mask).sum().backward()
    again = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    torch.testing.assert_close(again, expected)


@torch.no_grad()
def test_adapters_copies_and_scalar_heads_keep_sequences_apart() -> None:
    batch = shared_batch()
    model = hybrid("qwen3_next")
    plain = response_outputs(model, batch, ["log_probs"], packed=False)["log_probs"]
    response_outputs(model, batch, ["log_probs"])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    found = response_outputs(copied, batch, ["log_probs"])["log_probs"]
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)
    adapted = add_adapters(copied, rank=2, alpha=4, target_modules=["in_proj_qkvz", "q_proj"])
    found = response_outputs(adapted, batch, ["log_probs"])["log_probs"]
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)
    critic = new_scalar_model(hybrid("lfm2").config).eval()
    assert runs_packed(critic, True)
    both = [response_outputs(critic, batch, ["values"], packed=packed)["values"] for packed in (True, False)]
    torch.testing.assert_close(both[0], both[1], atol=1e-5, rtol=1e-5)


def test_models_without_mixers_stay_as_they_are() -> None:
    model = tiny_model()
    assert not prepare_mixers(model)
    assert not any("forward" in vars(part) or part._forward_pre_hooks for part in model.modules())


@torch.no_grad()
def test_a_model_that_was_prepared_computes_the_same_for_others() -> None:
    """For example in transformers' generate."""
    model = hybrid("lfm2")
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model(input_ids=ids).logits
    assert prepare_mixers(model) and prepare_mixers(model)
    assert torch.equal(model(input_ids=ids).logits, before)
