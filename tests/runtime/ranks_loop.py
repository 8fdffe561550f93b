"""Runs of the loop as one of several ranks, beside runs of the same configuration as one process; started by test_local.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from strop.backends.base import MicroBatching
from strop.backends.fsdp import FsdpBackend
from strop.backends.sharded import local
from strop.backends.single import SingleBackend
from strop.config.compose import load
from strop.config.schema.model import Optim
from strop.ranks import Ranks, SharedFailure
from strop.run.checkpoint import load as load_checkpoint
from strop.run.merge import merge
from strop.trainer.build import build_ppo
from strop.trainer.shares import deal_prompts
from strop.types import Prompt
from tests.backends.ranks import here
from tests.models.tiny import tiny_batch, tiny_model
from tests.trainer.runs import metrics, same, weights

TOLERANCE = 1e-5
PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.ref.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]
FIVE = ["trainer.total_training_steps=5", "trainer.save_freq=5", "trainer.test_freq=5"]
UNLIKE = ("timing", "perf/", "rollout/", "reward/seconds", "val-aux/reward/seconds", "global_seqlen")
"""What may differ: clocks, and what one engine of several reports about itself."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One folder for all ranks."""
    return Path(here().from_lead(str(tmp_path)))


@pytest.fixture
def settings(overrides: list[str], folder: Path) -> list[str]:
    """Of rank 0: every rank must read the same files."""
    common = here().from_lead([word for word in overrides if "default_local_dir" not in word])
    return [*common, "trainer.device=cpu"]


def fit(settings: list[str], place: Path, ranks: Ranks) -> Path:
    world = [f"trainer.n_gpus_per_node={ranks.world}", f"trainer.default_local_dir={place}"]
    build_ppo(load("ppo_trainer", [*settings, *world]), ranks).fit()
    ranks.gather(None)
    return place


def alone(settings: list[str], place: Path) -> Path:
    """The same run by one process, while the others wait."""
    if here().lead:
        fit(settings, place, Ranks())
    here().gather(None)
    return place


def assert_alike(one: Path, many: Path, step: int) -> None:
    if not here().lead:
        return
    expected, found = load_checkpoint(one / f"global_step_{step}"), load_checkpoint(many / f"global_step_{step}")
    for part in (name for name in expected if name.endswith("/model")):
        assert expected[part].keys() == found[part].keys()
        for name, weight in expected[part].items():
            assert (weight - found[part][name]).abs().max() <= TOLERANCE * weight.abs().max(), (part, name)
    ours, theirs = metrics(many), metrics(one)
    assert ours.keys() == theirs.keys()
    for number, row in theirs.items():
        assert row.keys() == ours[number].keys()
        for name, value in row.items():
            if not name.startswith(UNLIKE):
                assert ours[number][name] == pytest.approx(value, rel=TOLERANCE, abs=2e-5), (number, name)


def test_five_steps_of_grpo_are_those_of_one_process(settings, folder):
    one = alone([*settings, *FIVE], folder / "one")
    many = fit([*settings, *FIVE], folder / "many", here())
    assert_alike(one, many, 5)


def test_five_steps_of_ppo_are_those_of_one_process(settings, folder):
    """Actor, critic and reference, two updates per step; with four ranks the copies of the weights are two."""
    hybrid = [f"{section}.fsdp_config.fsdp_size=2" for section in ("actor_rollout_ref.actor", "critic.model")]
    one = alone([*settings, *PPO, *FIVE], folder / "one")
    many = fit([*settings, *PPO, *FIVE, *(hybrid if here().world == 4 else [])], folder / "many", here())
    assert_alike(one, many, 5)


def test_a_row_shared_by_two_ranks_gives_the_same_run(settings, folder):
    sliced = ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "critic.ulysses_sequence_parallel_size=2"]
    one = alone([*settings, *PPO, *FIVE], folder / "one")
    assert_alike(one, fit([*settings, *PPO, *FIVE, *sliced], folder / "many", here()), 5)


def test_resuming_with_as_many_ranks_is_exact_and_with_others_nearly(settings, folder):
    whole = fit([*settings, "trainer.enable_ema=true"], folder / "whole", here())
    torn = fit([*settings, "trainer.enable_ema=true", "trainer.total_training_steps=2"], folder / "torn", here())
    fit([*settings, "trainer.enable_ema=true"], torn, here())
    if here().lead:
        assert same(weights(whole, 4), weights(torn, 4))
        assert same(*(load_checkpoint(f / "global_step_4")["trainer"]["ema"]["average"] for f in (whole, torn)))
    fewer = fit([*settings, "trainer.total_training_steps=2"], folder / "fewer", here())
    assert_alike(alone(settings, folder / "one"), alone(settings, fewer), 4)
    more = alone([*settings, "trainer.total_training_steps=2"], folder / "more")
    assert_alike(folder / "one", fit(settings, more, here()), 4)


def test_a_sharded_checkpoint_is_merged_and_read_by_torch(settings, folder):
    run = fit([*settings, "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"], folder / "run", here())  # fmt: skip
    if here().lead:
        saved = run / "global_step_4" / "actor"
        merged = load_file(merge(str(saved), str(folder / "merged")) / "model.safetensors")
        exported = load_file(saved / "huggingface" / "model.safetensors")
        own = weights(run, 4)
        target = {name: torch.zeros_like(weight) for name, weight in own.items()}
        dcp_load(target, storage_reader=HuggingFaceStorageReader(str(saved / "model")), no_dist=True)
        assert same(target, own)
        for name, weight in exported.items():
            assert torch.equal(weight, own[name]) and torch.allclose(merged[name].float(), weight, atol=1e-2)
    here().gather(None)


def test_adapters_and_tied_embeddings_are_trained_alike(settings, folder):
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true"]
    one = alone([*settings, *lora], folder / "one")
    assert_alike(one, fit([*settings, *lora], folder / "many", here()), 4)


def test_a_model_that_one_rank_does_not_have_is_named_by_all(settings, folder):
    missing = ["actor_rollout_ref.model.tokenizer_path=" + next(w for w in settings if "model.path" in w).partition("=")[2]]
    own = ["actor_rollout_ref.model.path=/nowhere"] if here().rank == 1 else []
    with pytest.raises(
        SharedFailure, match=r"Rank 1 of \d failed making the model \(model.path\): ValueError: model.path='/now"
    ):
        fit([*settings, *missing, *own], folder / "run", here())


def test_ranks_that_read_other_data_are_stopped():
    prompts = [Prompt(row + (here().rank == 1), [1, 2, row], [], "x") for row in range(8)]
    with pytest.raises(SharedFailure, match=r"Ranks disagree about the prompts of this step \(data.train_files\): rank 0 has"):
        deal_prompts(prompts, here())


def test_every_rank_holds_its_share_of_weights_gradients_and_moments():
    def held(backend: SingleBackend) -> int:
        tensors = [*backend.module.parameters(), *(m.grad for m in backend.weights.masters.values())]
        tensors += [t for state in backend.optimizer.state.values() for t in state.values()]
        storages = [local(t).untyped_storage() for t in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # gradients of a layer share one

    def trained(make, **more):
        backend = make(tiny_model(hidden_size=64, num_hidden_layers=3), optim=Optim(lr=1e-3), **more)
        for updated in (True, False):
            backend.forward_backward(tiny_batch(), ["log_probs"], lambda o, b: (o.log_probs.sum(), {}), MicroBatching(rows=2))
            if updated:
                backend.step()
        return held(backend)

    share = trained(FsdpBackend, ranks=here()) / trained(SingleBackend)
    assert share <= 1 / here().world + 0.1, share
