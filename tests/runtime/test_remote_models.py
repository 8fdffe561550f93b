"""Frozen models elsewhere: whoever asks them gets the numbers of a model beside the trainer."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.backends.single import SingleBackend
from strop.config.compose import load
from strop.config.derived import resource_pools
from strop.config.rules import check
from strop.ranks import Ranks
from strop.runtime.remote_models import (
    BatchArrays,
    FrozenModel,
    RemoteReference,
    RemoteTokenScorer,
    balanced_shares,
)
from tests.models.tiny import tiny_batch, tiny_model


class Here:
    """Copies in this process; what they are asked and say travels as bytes."""

    def __init__(self, size, make):
        self.size, self.asked = size, []
        self.copies = [FrozenModel(make) for _ in range(size)]

    def call(self, number, method, *arguments):
        self.asked.append(number)
        answer: Future = Future()
        try:
            found = getattr(self.copies[number], method)(*pickle.loads(pickle.dumps(arguments)))
            answer.set_result(pickle.loads(pickle.dumps(found)))
        except ValueError as error:
            answer.set_exception(error)
        return answer


class Lengths:
    """Scores a sequence by its length and its first token."""

    def score(self, sequences):
        return [len(ids) + ids[0] / 100 for ids in sequences]


def test_relative_paths_begin_in_the_folder_of_the_command(tmp_path, monkeypatch):
    """Ray starts its workers in the folder of `ray start`."""
    (tmp_path / "command").mkdir()
    (tmp_path / "command" / "model").touch()
    monkeypatch.chdir(tmp_path)  # building the model changes the folder, and this goes back
    copy = FrozenModel(lambda: Path("model").stat().st_size, str(tmp_path / "command"))
    copy.ready()
    assert copy.model == 0


def test_a_batch_arrives_as_it_was():
    batch = tiny_batch()
    arrived = BatchArrays.of(batch).batch()
    assert all(torch.equal(a, b) for a, b in zip(arrived.sequences, batch.sequences, strict=True))
    assert torch.equal(arrived.mask, batch.mask) and torch.equal(arrived.prompt_lengths, batch.prompt_lengths)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_log_probs_are_those_of_a_reference_beside_the_actor(size):
    batch, want = tiny_batch(), ["log_probs", "entropy"]
    expected = SingleBackend(tiny_model()).forward(batch, want, MicroBatching(rows=2))
    copies = Here(size, lambda: SingleBackend(tiny_model()))
    found = RemoteReference(copies, Ranks()).forward(batch, want, MicroBatching(rows=2))
    assert torch.equal(found.log_probs, expected.log_probs) or size > 1
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy, expected.entropy, atol=1e-5, rtol=1e-5)
    assert found.values is None and sorted(copies.asked) == list(range(min(size, len(batch))))


def test_scores_come_back_in_order_and_ranks_begin_with_different_copies():
    sequences = [[row] * (row + 1) for row in range(7)]
    first, second = Here(3, Lengths), Here(3, Lengths)
    assert RemoteTokenScorer(first, Ranks()).score(sequences) == Lengths().score(sequences)
    assert RemoteTokenScorer(second, Ranks(1, 2)).score(sequences[:1]) == Lengths().score(sequences[:1])
    assert (first.asked, second.asked) == ([0, 1, 2], [1])
    assert RemoteTokenScorer(first, Ranks()).score([]) == []


def test_shares_have_about_equal_work():
    shares = balanced_shares([100, 1, 1, 98, 2, 2], 2)
    assert sorted(row for share in shares for row in share) == list(range(6))
    assert {0, 3} & set(shares[0]) and {0, 3} & set(shares[1])


def test_what_a_copy_raises_reaches_whoever_asked():
    def broken():
        raise ValueError("model.path='/nowhere' does not exist.")

    with pytest.raises(ValueError, match="nowhere"):
        RemoteTokenScorer(Here(1, broken), Ranks()).score([[1]])


REF, REWARD = (
    "actor_rollout_ref.ref.nnodes=1",
    ["reward_model.enable_resource_pool=true", "reward_model.nnodes=1"],
)
KL = "actor_rollout_ref.actor.use_kl_loss=true"
MODEL = ["reward_model.enable=true", "reward_model.model.path=r"]


@pytest.mark.parametrize(
    ("words", "roles", "said"),
    [
        ([REF, KL], ["reference"], ""),
        ([*MODEL, *REWARD], ["reward"], ""),
        ([REF], [], "the run has no reference"),
        ([REF, KL, "actor_rollout_ref.model.lora_rank=4"], [], "is the actor without its adapters. Set 0."),
        ([REF, KL, "trainer.runtime=local"], ["reference"], "local, but the reference model asks for machines of its own"),
        ([*MODEL, REWARD[0]], ["reward"], "reward_model.nnodes=0 and n_gpus_per_node=8. Set reward_model.nnodes"),
        (REWARD, [], "the run has no reward model"),
        ([*REWARD, "reward_model.judge.enable=true"], [], "a judge that runs here shares the actor's devices"),
        (
            ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=m.gguf",
             "+actor_rollout_ref.rollout.engine_kwargs.vllm.python=/bin/python"],
            ["rollout"],
            "vllm replicas read a Hugging Face folder, but m.gguf is a GGUF file",
        ),
    ],
)  # fmt: skip
def test_who_has_machines_and_what_does_not_go_together(words, roles, said):
    loaded = load("ppo_trainer", ["actor_rollout_ref.model.path=m", "data.train_files=x", *words])
    assert list(resource_pools(loaded.config)) == roles
    told = [str(finding) for finding in check(loaded)]
    assert (
        any(said in one for one in told)
        if said
        else not any("machines of" in one or "pool" in one for one in told)
    )
