"""The sharding backend beside the one of one device, as one of several ranks; started by test_fsdp.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.backends.fsdp import FsdpBackend
from strop.backends.single import SingleBackend
from strop.config.schema.model import Fsdp, WrapPolicy
from strop.models.build import checkpoint_activations
from strop.models.precision import widen_residual
from tests.backends.ranks import here
from tests.backends.test_conformance import flat_gradient, optim, policy_loss, train
from tests.models.tiny import tiny_batch, tiny_model

WAYS: dict[str, dict[str, Any]] = {
    "layers": {},
    "kept": {"settings": Fsdp(reshard_after_forward=False)},
    "prefetched": {"settings": Fsdp(forward_prefetch=True)},
    "by size": {"settings": Fsdp(wrap_policy=WrapPolicy(min_num_params=2000))},
    "offloaded": {"settings": Fsdp(offload_policy=True)},
    "shared rows": {"sequence_parallel": 2},
}


def weights(backend: SingleBackend) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in backend.export_weights()}


def assert_trained_alike(one: SingleBackend, many: SingleBackend) -> None:
    train(one, 3)
    train(many, 3)
    expected, found = weights(one), weights(many)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert (weight - found[name]).abs().max() <= 1e-5 * weight.abs().max(), name


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_shard_trains_alike(way):
    many = FsdpBackend(tiny_model(), ranks=here(), optim=optim(), **WAYS[way])
    assert_trained_alike(SingleBackend(tiny_model(), optim=optim()), many)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma2", "granite", "mixtral"])
def test_families_train_alike(family):
    """Without AdamW, which makes full steps of gradients that are 0 but for rounding, as those of key biases are."""
    plain = optim(optimizer="SGD", lr=0.1)
    one = SingleBackend(tiny_model(family), optim=plain)
    assert_trained_alike(one, FsdpBackend(tiny_model(family), ranks=here(), optim=plain))


def test_checkpointed_activations_change_nothing():
    model = tiny_model()
    checkpoint_activations(model)
    assert_trained_alike(SingleBackend(tiny_model(), optim=optim()), FsdpBackend(model, ranks=here(), optim=optim()))


def test_a_residual_stream_in_float32_stays_so_in_bf16():
    """FSDP would cast what enters a layer; rounded there, log-probs would not be those of one device."""
    found = []
    for make in (SingleBackend, lambda model, **more: FsdpBackend(model, ranks=here(), **more)):
        model = tiny_model()
        assert widen_residual(model)
        backend = make(model, optim=optim(), compute=torch.bfloat16)
        log_probs = backend.forward(tiny_batch(), ["log_probs"], MicroBatching(rows=1)).log_probs
        backend.forward_backward(tiny_batch(), ["log_probs"], policy_loss, MicroBatching(rows=1))
        found.append((log_probs, flat_gradient(backend)))
    assert torch.equal(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).norm() / found[0][1].norm() < 0.02
