"""Runs of the loop as one of several ranks, beside runs of the same configuration as one process; started by test_local.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from strop.backends.base import MicroBatching
from strop.backends.fsdp.sharded import local
from strop.backends.single import ModuleBackend
from strop.config.compose import load
from strop.config.schema.model import OptimConfig
from strop.ppo.build import build_ppo
from strop.ppo.rank_sharing import WaitingPrompts, shard_prompts
from strop.ranks import Ranks, SharedFailure
from strop.run.checkpoint.store import load as load_checkpoint
from strop.run.merge.merge import merge
from strop.types import Prompt
from tests.backends.make import sharded, single
from tests.backends.ranks import here
from tests.models.tiny import tiny_batch, tiny_model
from tests.ppo.runs import metrics, same, weights

TOLERANCE = 1e-5
PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.ref.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]
FIVE = ["trainer.total_training_steps=5", "trainer.save_freq=5", "trainer.test_freq=5"]
UNLIKE = (
    "timing", "perf/", "rollout/", "reward/seconds", "val-aux/reward/seconds", "global_seqlen", "health/"
)  # fmt: skip
"""What may differ: clocks, alerts, some of which watch clocks, and what one engine of several reports about itself."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One folder for all ranks."""
    return Path(here().broadcast_object(str(tmp_path)))


@pytest.fixture
def settings(overrides: list[str], folder: Path) -> list[str]:
    """Of rank 0: every rank must read the same files."""
    common = here().broadcast_object([word for word in overrides if "default_local_dir" not in word])
    return [*common, "trainer.device=cpu"]


def fit(settings: list[str], place: Path, ranks: Ranks) -> Path:
    world = [f"trainer.n_gpus_per_node={ranks.world}", f"trainer.default_local_dir={place}"]
    build_ppo(load("ppo_trainer", [*settings, *world]), ranks).fit()
    ranks.all_gather_object(None)
    return place


def alone(settings: list[str], place: Path) -> Path:
    """The same run by one process, while the others wait."""
    if here().is_rank0:
        fit(settings, place, Ranks())
    here().all_gather_object(None)
    return place


def assert_alike(one: Path, many: Path, step: int) -> None:
    if not here().is_rank0:
        return
    expected, found = (
        load_checkpoint(one / f"global_step_{step}"),
        load_checkpoint(many / f"global_step_{step}"),
    )
    for part in (name for name in expected if name.endswith("/model")):
        assert expected[part].keys() == found[part].keys()
        for name, weight in expected[part].items():
            assert (weight - found[part][name]).abs().max() <= TOLERANCE * weight.abs().max(), (part, name)
    ours, theirs = metrics(many), metrics(one)
    assert ours.keys() == theirs.keys()
    for number, row in theirs.items():
        names = [{name for name in found if not name.startswith("health/")} for found in (row, ours[number])]
        assert names[0] == names[1]
        for name, value in row.items():
            if not name.startswith(UNLIKE):
                assert ours[number][name] == pytest.approx(value, rel=TOLERANCE, abs=2e-5), (number, name)


ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"
COPIES = [
    f"{section}.fsdp_config.fsdp_size=2" for section in (ACTOR, "critic.model", "actor_rollout_ref.ref")
]
ROWS = [f"{role}.ulysses_sequence_parallel_size=2" for role in (ACTOR, CRITIC)]
TENSOR = [f"{role}.tensor_parallel_size=2" for role in (ACTOR, CRITIC)]
WAYS: dict[str, tuple[int, list[str]]] = {
    "sharded": (1, []),
    "hybrid": (4, COPIES),
    "shared-rows": (2, ROWS),
    "shared-matrices": (2, [*TENSOR, f"{ROLLOUT}.name=native", f"{ROLLOUT}.tensor_model_parallel_size=2"]),
    "hybrid-shared-matrices": (4, [*COPIES, *TENSOR]),
}
"""How ranks share the work: what their number must be a multiple of, and what to set."""
ALGORITHMS = {"grpo": [], "ppo": PPO}
_by_one: dict[str, Path] = {}


def by_one_process(algorithm: str, settings: list[str], folder: Path) -> Path:
    """Five steps by one process; made once."""
    if algorithm not in _by_one:
        _by_one[algorithm] = alone([*settings, *ALGORITHMS[algorithm], *FIVE], folder / "one")
    return _by_one[algorithm]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("way", WAYS)
def test_five_steps_are_those_of_one_process(way, algorithm, settings, folder):
    """PPO: actor, critic and reference, two updates per step. With shared matrices the engine samples by parts as well."""
    multiple, keys = WAYS[way]
    if here().world % multiple:
        pytest.skip(f"needs a multiple of {multiple} ranks")
    one = by_one_process(algorithm, settings, folder)
    many = fit([*settings, *ALGORITHMS[algorithm], *FIVE, *keys], folder / "many", here())
    assert_alike(one, many, 5)


def test_a_run_with_shared_matrices_is_resumed_by_any_and_merged(settings, folder):
    whole = fit([*settings, *TENSOR], folder / "whole", here())
    torn = fit([*settings, *TENSOR, "trainer.total_training_steps=2"], folder / "torn", here())
    fit([*settings, *TENSOR], torn, here())
    if here().is_rank0:
        assert same(weights(whole, 4), weights(torn, 4))
        merged = load_file(
            merge(str(whole / "global_step_4" / "actor"), str(folder / "merged")) / "model.safetensors"
        )
        assert all(
            torch.allclose(merged[name].float(), w, atol=1e-2)
            for name, w in weights(whole, 4).items()
            if name in merged
        )
    fewer = fit([*settings, *TENSOR, "trainer.total_training_steps=2"], folder / "fewer", here())
    assert_alike(alone(settings, folder / "one"), alone(settings, fewer), 4)


def test_resuming_with_as_many_ranks_is_exact_and_with_others_nearly(settings, folder):
    whole = fit([*settings, "trainer.enable_ema=true"], folder / "whole", here())
    torn = fit(
        [*settings, "trainer.enable_ema=true", "trainer.total_training_steps=2"], folder / "torn", here()
    )
    fit([*settings, "trainer.enable_ema=true"], torn, here())
    if here().is_rank0:
        assert same(weights(whole, 4), weights(torn, 4))
        assert same(
            *(load_checkpoint(f / "global_step_4")["trainer"]["ema"]["average"] for f in (whole, torn))
        )
    fewer = fit([*settings, "trainer.total_training_steps=2"], folder / "fewer", here())
    assert_alike(alone(settings, folder / "one"), alone(settings, fewer), 4)
    more = alone([*settings, "trainer.total_training_steps=2"], folder / "more")
    assert_alike(folder / "one", fit(settings, more, here()), 4)


def test_a_sharded_checkpoint_is_merged_and_read_by_torch(settings, folder):
    run = fit([*settings, "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"], folder / "run", here())  # fmt: skip
    if here().is_rank0:
        saved = run / "global_step_4" / "actor"
        merged = load_file(merge(str(saved), str(folder / "merged")) / "model.safetensors")
        exported = load_file(saved / "huggingface" / "model.safetensors")
        own = weights(run, 4)
        target = {name: torch.zeros_like(weight) for name, weight in own.items()}
        dcp_load(target, storage_reader=HuggingFaceStorageReader(str(saved / "model")), no_dist=True)
        assert same(target, own)
        for name, weight in exported.items():
            assert torch.equal(weight, own[name]) and torch.allclose(merged[name].float(), weight, atol=1e-2)
    here().all_gather_object(None)


def test_adapters_and_tied_embeddings_are_trained_alike(settings, folder):
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true"]
    one = alone([*settings, *lora], folder / "one")
    assert_alike(one, fit([*settings, *lora], folder / "many", here()), 4)


def test_a_model_that_one_rank_does_not_have_is_named_by_all(settings, folder):
    missing = [
        "actor_rollout_ref.model.tokenizer_path="
        + next(w for w in settings if "model.path" in w).partition("=")[2]
    ]
    own = ["actor_rollout_ref.model.path=/nowhere"] if here().rank == 1 else []
    with pytest.raises(
        SharedFailure,
        match=r"Rank 1 of \d failed making the model \(model.path\): ValueError: model.path='/now",
    ):
        fit([*settings, *missing, *own], folder / "run", here())


def test_ranks_that_read_other_data_are_stopped():
    prompts = [Prompt(row + (here().rank == 1), [1, 2, row], [], "x") for row in range(8)]
    with pytest.raises(
        SharedFailure, match=r"Ranks disagree about the prompts of this step \(data.train_files\): rank 0 has"
    ):
        shard_prompts(list(enumerate(prompts)), here())


def test_a_long_tail_is_taken_over_by_ranks_with_room(settings, folder):
    """Eight prompts of four samples, and engines of eight rows: two prompts fit, the others go to whoever has room."""
    narrow = ["actor_rollout_ref.rollout.name=native", "actor_rollout_ref.rollout.max_num_seqs=8"]
    one = alone([*settings, *narrow], folder / "one")
    assert_alike(one, fit([*settings, *narrow], folder / "many", here()), 4)


@pytest.mark.parametrize("frees", [True, False])
def test_engines_give_their_cache_back_while_models_learn(frees, settings, folder):
    asked = [
        *settings,
        f"{ROLLOUT}.name=native",
        f"{ROLLOUT}.free_cache_engine={frees}",
        "trainer.total_training_steps=1",
    ]
    world = [f"trainer.n_gpus_per_node={here().world}", f"trainer.default_local_dir={folder}/run"]
    trainer = build_ppo(load("ppo_trainer", [*asked, *world]), here())
    update, held = trainer.update, []

    def watched(batch, record):
        held.append(trainer.collector.engine._step_loop.runner.cache.bytes)
        update(batch, record)

    trainer.update = watched
    trainer.fit()
    here().all_gather_object(None)
    assert len(held) == 1 and (held[0] == 0) == frees


def test_every_prompt_is_taken_once_and_late_ranks_lose_theirs():
    shares = [[(10 * rank + i, Prompt(i, [1], [], "x")) for i in range(6)] for rank in range(here().world)]
    waiting = WaitingPrompts(here(), "test", [share[2:] for share in shares])
    here().all_gather_object(None)
    mine = [number for number, _ in waiting.claim()] if here().rank == 0 else []
    here().all_gather_object(None)
    rest = [number for number, _ in waiting.claim()]
    told = here().all_gather_object((mine, rest))
    assert told[0][0][:4] == [2, 3, 4, 5] and sorted(told[0][0]) == sorted(
        n for s in shares for n, _ in s[2:]
    )
    assert all(not found for _, found in told)


def test_every_rank_holds_its_share_of_weights_gradients_and_moments():
    def held(backend: ModuleBackend) -> int:
        tensors = [*backend.module.parameters(), *(m.grad for m in backend.weights.masters.values())]
        tensors += [t for state in backend.optimizer.state.values() for t in state.values()]
        storages = [local(t).untyped_storage() for t in tensors]
        return sum(
            {storage.data_ptr(): storage.nbytes() for storage in storages}.values()
        )  # gradients of a layer share one

    def trained(make, **more):
        backend = make(tiny_model(hidden_size=64, num_hidden_layers=3), optim=OptimConfig(lr=1e-3), **more)
        for updated in (True, False):
            backend.forward_backward(
                tiny_batch(), ["log_probs"], lambda o, b: (o.log_probs.sum(), {}), MicroBatching(rows=2)
            )
            if updated:
                backend.step()
        return held(backend)

    for way in ({}, {"tensor_parallel": 2}) if here().world % 2 == 0 else ({},):
        share = trained(sharded, ranks=here(), **way) / trained(single)
        assert share <= 1 / here().world + 0.1, (way, share)


def test_a_step_may_have_fewer_sequences_than_devices(settings, folder):
    """Ranks that share each row need no row of their own."""
    if here().world % 2:
        pytest.skip("needs a multiple of 2 ranks")
    few = ["data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1", f"{ROLLOUT}.n=1", *ROWS]
    few += ["algorithm.adv_estimator=reinforce_plus_plus", "trainer.total_training_steps=2"]
    run = fit([*settings, *few], folder / "few", here())
    if here().is_rank0:
        assert set(metrics(run)) >= {1, 2}
