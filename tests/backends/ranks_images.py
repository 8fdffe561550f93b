"""Batches with images over two ranks, beside one device; started by test_fsdp.py."""

from __future__ import annotations

import pytest
import torch

from strop.backends.base import MicroBatching
from tests.backends.make import sharded, single
from tests.backends.ranks import here
from tests.backends.test_conformance import optim, policy_loss
from tests.models.vision.test_passes import batch_of_rows, rows_of
from tests.models.vision.tiny_vlm import tiny_vlm


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
