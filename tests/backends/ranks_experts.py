"""Experts divided over ranks, compared with one process; started by test_experts.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from strop.backends.fsdp.backend import FsdpBackend
from strop.backends.fsdp.experts import experts_of
from strop.backends.fsdp.sharded import region
from strop.config.schema.model import FsdpConfig, WrapPolicyConfig
from strop.models.checkpointing import checkpoint_activations
from tests.backends.make import make_backend, single
from tests.backends.ranks import here
from tests.backends.ranks_fsdp import assert_trained_alike, weights
from tests.backends.test_conformance import optim, train
from tests.models.tiny import tiny_model

WAYS: dict[str, dict[str, Any]] = {
    "layers": {},
    "kept": {"reshard_after_forward": False},
    "prefetched": {"forward_prefetch": True},
    "by size": {"wrap_policy": WrapPolicyConfig(min_num_params=2000)},
    "offloaded": {"offload_policy": True},
    "replicas": {"fsdp_size": 2},
}
PLAIN = optim(optimizer="SGD", lr=0.1)
"""AdamW makes full steps of gradients that are 0 but for rounding."""
sharded = partial(make_backend, FsdpBackend, ranks=here())


def divided(model: Any, size: int = 2, sequence_parallel: int = 1, **settings: Any) -> Any:
    fsdp = FsdpConfig(expert_parallel_size=size, **settings)
    return sharded(model, optim=PLAIN, fsdp=fsdp, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(("family", "way"), [("mixtral", "layers"), *[("qwen3_moe", way) for way in WAYS]])
def test_divided_experts_train_alike(family, way):
    assert_trained_alike(single(tiny_model(family), optim=PLAIN), divided(tiny_model(family), **WAYS[way]))


def test_every_rank_has_experts_of_its_own():
    many = divided(tiny_model("qwen3_moe"), size=here().world)
    mine = set()
    for module in experts_of(many.module):
        assert module.gate_up_proj.to_local().shape[0] == 4 // here().world
        mine.add(region(module.gate_up_proj)[0].start)
    assert mine == {here().rank * 4 // here().world}


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointed_activations_and_shared_rows_change_nothing(mode):
    """Recomputation sends tokens a second time; with sequence parallelism each rank sends its part of a row."""
    model = tiny_model("qwen3_moe")
    checkpoint_activations(model, mode)
    rows = 2 if mode == "selective" else 1
    assert_trained_alike(single(tiny_model("qwen3_moe"), optim=PLAIN), divided(model, sequence_parallel=rows))


def one_sided(model: Any) -> Any:
    """Every token goes to the first two of four experts."""

    def first_two(_module: Any, _inputs: Any, found: Any) -> Any:
        logits, shares, chosen = found
        return logits, shares, torch.arange(2).expand_as(chosen)

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(first_two)
    return model


def test_a_rank_whose_experts_get_no_token_keeps_step():
    one = single(one_sided(tiny_model("qwen3_moe")), optim=PLAIN)
    assert_trained_alike(one, divided(one_sided(tiny_model("qwen3_moe"))))


def test_states_of_divided_experts_go_to_other_ways_and_back():
    plain = single(tiny_model("qwen3_moe"), optim=optim())
    train(plain, 1)
    many = sharded(tiny_model("qwen3_moe", seed=1), optim=optim(), fsdp=FsdpConfig(expert_parallel_size=2))
    many.load_state_dict(plain.state_dict())
    found = weights(many)
    for name, weight in weights(plain).items():
        assert torch.equal(weight, found[name]), name
    moment = many.state_dict()["optimizer"]["model.layers.0.mlp.experts.down_proj"]["exp_avg"]
    kept = plain.state_dict()["optimizer"]["model.layers.0.mlp.experts.down_proj"]["exp_avg"]
    assert torch.equal(moment.full_tensor(), kept)


@pytest.mark.parametrize(
    ("family", "ways", "message"),
    [
        ("llama", {}, "llama has no experts"),
        ("qwen3_moe", {"size": 3}, "3 does not divide the"),
    ],
)
def test_what_cannot_be_divided_is_refused(family, ways, message):
    with pytest.raises(ValueError, match=message):
        divided(tiny_model(family), **ways)
