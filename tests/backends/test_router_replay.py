"""Updates send tokens to the experts that were recorded, whatever the weights have become, on every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.backends.single import SingleBackend
from strop.config.compose import load
from strop.config.rules import check
from strop.config.rules.router_replay import MODE
from strop.models.checkpointing import checkpoint_activations
from strop.models.layouts.routing import routing_of
from strop.preflight.model_checks import replay_findings
from tests.backends.make import make_backend
from tests.backends.ranks import pytest_as_ranks
from tests.backends.replay_checks import FAMILIES, assert_replays, by_hand, moved
from tests.backends.test_conformance import optim
from tests.config.verl_commands import INPUTS
from tests.models.tiny import tiny_batch, tiny_model

R2 = f"{MODE}=R2"
R3 = f"{MODE}=R3"
VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.python=/usr/bin/python3",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_takes_the_recorded_experts(family):
    assert_replays(make_backend, SingleBackend, family)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_layers_that_are_computed_again_take_them_too(mode):
    def build(model, **settings):
        checkpoint_activations(model, mode)
        return make_backend(SingleBackend, model, **settings)

    assert_replays(lambda _, model, **settings: build(model, **settings), SingleBackend, "qwen3_moe")


def test_without_replay_routers_choose_and_sampling_is_never_bound():
    """A backend that does not replay ignores the experts of the batch; after an update routers are free."""
    model = tiny_model("qwen3_moe")
    backend = make_backend(SingleBackend, model, optim=optim(), router_replay="R2")
    batch = tiny_batch()
    found = backend.forward(batch, ["log_probs", "experts"], MicroBatching(rows=2))
    wrong = (found.experts + 1) % model.config.num_experts
    free = backend.forward(batch.replace(experts=wrong), ["log_probs"], MicroBatching(rows=2)).log_probs
    assert torch.equal(free, found.log_probs)
    assert all(layer.given is None and not layer.records for layer in routing_of(model).layers)


def test_old_log_probs_take_the_experts_of_the_engine_too():
    """R3: a forward pass under other weights has the log-probs of a model that is told the experts."""
    batch = tiny_batch([(3, 5), (7, 2), (4, 3), (12, 6)])
    first = make_backend(SingleBackend, tiny_model("qwen3_moe"), optim=optim(), router_replay="R3")
    experts = first.forward(batch, ["log_probs", "experts"], MicroBatching(rows=2)).experts
    second = make_backend(SingleBackend, moved(tiny_model("qwen3_moe"), 1), optim=optim(), router_replay="R3")
    expected, _ = by_hand(moved(tiny_model("qwen3_moe"), 1), batch, experts)
    told = batch.replace(experts=experts.to(torch.uint8))
    found = second.forward(told, ["log_probs"], MicroBatching(rows=2)).log_probs
    free = second.forward(batch, ["log_probs"], MicroBatching(rows=2)).log_probs
    for row, log_probs in enumerate(expected):
        assert (found[row, : len(log_probs)] - log_probs).abs().max() <= 1e-5
        assert (free[row, : len(log_probs)] - log_probs).abs().max() > 1e-3


def test_a_dense_model_has_nothing_to_replay():
    backend = make_backend(SingleBackend, tiny_model("llama"), optim=optim(), router_replay="R2")
    with pytest.raises(ValueError, match=r"no router of experts"):
        backend.forward(tiny_batch(), ["log_probs", "experts"], MicroBatching(rows=2))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_replay(world):
    pytest_as_ranks(world, [str(Path(__file__).with_name("ranks_router_replay.py"))], timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_train_with_the_experts_of_the_engine(world):
    pytest_as_ranks(world, [str(Path(__file__).with_name("ranks_routed_runs.py"))], timeout=1500)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([R3, "actor_rollout_ref.rollout.name=hf"], "and hf does not return them"),
        ([R3, "actor_rollout_ref.actor.aux_loss_coef=0.1"], "load-balancing loss"),
        (
            [R3, *VLLM, "+actor_rollout_ref.rollout.engine_kwargs.vllm.url=http://127.0.0.1:1"],
            "from a server",
        ),
        ([R3, *VLLM, "actor_rollout_ref.rollout.enable_prefix_caching=false"], "prefix cache"),
        ([R2, "actor_rollout_ref.actor.aux_loss_coef=0.1"], "load-balancing loss"),
        (
            [R2, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"],
            "share",
        ),
        ([R2, "algorithm.rollout_correction.bypass_mode=true"], "those of the engine"),
    ],
)
def test_what_it_does_not_go_together_with(words, said):
    loaded = load("ppo_trainer", [*INPUTS["ppo_trainer"], *words])
    refused = [finding for finding in check(loaded) if finding.key == MODE]
    assert len(refused) == 1 and said in refused[0].message


def test_a_dense_model_is_refused_at_check_time(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "experts")
    for name, refused in {"dense": 1, "experts": 0}.items():
        words = [*INPUTS["ppo_trainer"], R3, f"actor_rollout_ref.model.path={tmp_path}/{name}"]
        found = replay_findings(load("ppo_trainer", words).config)
        assert [finding.message for finding in found] == [
            "R3, but llama has no experts. Set disabled."
        ] * refused
