"""Batches with images over two ranks, beside one device; started by test_fsdp.py."""

from __future__ import annotations

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.models.heads import new_scalar_model
from tests.backends.make import sharded, single
from tests.backends.ranks import here
from tests.backends.test_conformance import optim, policy_loss, value_loss
from tests.models.vision.test_passes import batch_of_rows, rows_of
from tests.models.vision.tiny_vlm import config_of, tiny_vlm, tokenizer_of


@pytest.mark.parametrize("micro", [8, 1])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava", "gemma3"])
def test_two_ranks_train_as_one(family: str, micro: int) -> None:
    """One row has no image, so that one rank has micro-batches without any."""
    batch = batch_of_rows(rows_of(family))
    batch = batch.replace(
        advantages=torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    )
    plain = optim(optimizer="SGD", lr=0.1)
    one = single(tiny_vlm(family), optim=plain)
    many = sharded(tiny_vlm(family), ranks=here(), optim=plain)
    found = []
    for backend in (one, many):
        log_probs = backend.forward(batch, ["log_probs"], MicroBatching(rows=micro)).log_probs
        backend.forward_backward(batch, ["log_probs"], policy_loss, MicroBatching(rows=micro))
        norm = backend.step().grad_norm
        weights = {name: weight.clone() for name, weight in backend.export_weights()}
        found.append((log_probs, norm, weights))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-5
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)
    for name, weight in found[0][2].items():
        assert (weight - found[1][2][name]).abs().max() <= 1e-5 * weight.abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize("micro", [8, 1])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_a_critic_of_two_ranks_sees_images_as_one_process_does(family: str, micro: int) -> None:
    batch = batch_of_rows(rows_of(family))
    returns = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    batch = batch.replace(advantages=returns)
    plain = optim(optimizer="SGD", lr=0.01)
    found = []
    for make in (single, sharded):
        critic = new_scalar_model(config_of(family, tokenizer_of(family)))
        critic.model.load_state_dict(tiny_vlm(family).model.state_dict())  # louder than a new model
        torch.nn.init.normal_(critic.score.weight, generator=torch.Generator().manual_seed(1))
        ranks = {} if make is single else {"ranks": here()}
        backend = make(critic, optim=plain, **ranks)
        values = [backend.forward(batch, ["values"], MicroBatching(rows=micro)).values]
        errors = []
        for _ in range(2):
            report = backend.forward_backward(batch, ["values"], value_loss, MicroBatching(rows=micro))
            errors.append((report["error"], backend.step().grad_norm))
        values.append(backend.forward(batch, ["values"], MicroBatching(rows=micro)).values)
        weights = {name: weight.clone() for name, weight in backend.export_weights()}
        found.append((values, errors, weights))
    (before, after), errors, weights = found[0]
    assert (after - before).abs().max() > 1e-2, "values moved"
    assert errors[1][0] < errors[0][0]
    for expected, value in zip(found[0][0], found[1][0], strict=True):
        assert (expected - value).abs().max() <= 1e-5 * expected.abs().max()
    for expected, pair in zip(errors, found[1][1], strict=True):
        assert pair == pytest.approx(expected, rel=1e-4)
    for name, weight in weights.items():
        assert (weight - found[1][2][name]).abs().max() <= 1e-5 * weight.abs().max().clamp(min=1e-3), name
