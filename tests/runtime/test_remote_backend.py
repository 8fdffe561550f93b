"""A critic elsewhere learns what one beside the actor learns, and leaves the same checkpoints."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.backends.micro_batches import NonFiniteLoss
from strop.config.compose import load
from strop.config.derived import resource_pools
from strop.config.rules import check
from strop.ppo.roles import learning_critic
from strop.ranks import Ranks
from strop.run.checkpoint.store import load as load_checkpoint
from strop.runtime.remote_backend import RemoteBackend, TrainingWorker, buckets, pack_tensor, unpack_tensor
from tests.models.tiny import tiny_batch
from tests.ppo.runs import metrics, run
from tests.runtime.started import CLOCKS


class Here:
    """One training worker in this process; what it is asked and says travels as bytes."""

    def __init__(self, make):
        self.worker, self.asked = TrainingWorker(make), []

    def call(self, method, *arguments):
        self.asked.append(method)
        sent = pickle.loads(pickle.dumps((method, arguments)))
        try:
            return pickle.loads(pickle.dumps(self.worker.run_method(*sent)))
        except NonFiniteLoss as problem:
            raise pickle.loads(pickle.dumps(problem)) from None


GAE = [
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1e-3",
    "critic.ppo_mini_batch_size=4",
    "critic.ppo_epochs=2",
]
EVERYTHING = "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]"


@pytest.fixture
def elsewhere(monkeypatch):
    """Pools are in this process."""

    def team(role, key):
        assert (role, key) == ("critic", "critic.nnodes")
        return Here(partial(learning_critic, team.config))

    monkeypatch.setattr("strop.runtime.ray.model_actors.RayTrainingWorkers", team)
    monkeypatch.setattr(
        "strop.runtime.remote_backend.BUCKET_BYTES", 3000
    )  # most tensors travel alone, small ones together

    def train(overrides, *more):
        words = [*overrides, *GAE, EVERYTHING, "critic.nnodes=1", *more]
        team.config = load("ppo_trainer", words).config
        return run(words)

    return train


def assert_equal_runs(one: Path, other: Path, steps: range) -> None:
    ours, theirs = metrics(one), metrics(other)
    for step in steps:
        for name in (name for name in theirs[step] if not name.startswith(CLOCKS)):
            assert ours[step][name] == theirs[step][name], (step, name)
    here, there = (load_checkpoint(folder / f"global_step_{steps[-1]}") for folder in (one, other))
    assert here.keys() == there.keys() and {"critic/model", "critic/optimizer", "critic/extra"} <= here.keys()
    for part in ("actor/model", "critic/model"):
        assert all(torch.equal(here[part][name], there[part][name]) for name in there[part])
    assert (
        str(here["critic/optimizer"]) == str(there["critic/optimizer"])
        and here["critic/extra"] == there["critic/extra"]
    )


@pytest.mark.slow
def test_a_run_learns_the_same_and_either_goes_on_from_the_other(overrides, elsewhere, tmp_path):
    together, apart, half = (tmp_path / name for name in ("together", "apart", "half"))
    run(overrides, *GAE, EVERYTHING, f"trainer.default_local_dir={together}")
    elsewhere(overrides, f"trainer.default_local_dir={apart}")
    assert_equal_runs(apart, together, range(1, 5))
    found, expected = (
        folder / "global_step_4/critic/huggingface/model.safetensors" for folder in (apart, together)
    )
    assert found.read_bytes() == expected.read_bytes()
    elsewhere(
        overrides,
        f"trainer.default_local_dir={half}",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
    )
    elsewhere(
        overrides,
        f"trainer.default_local_dir={half}",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
    )
    run(overrides, *GAE, EVERYTHING, f"trainer.default_local_dir={half}")
    assert_equal_runs(half, together, range(3, 5))


@dataclass(frozen=True)
class SpoiltLoss:
    row: int

    def __call__(self, outputs, micro):
        return outputs.values.sum() * torch.where(micro.row_ids == self.row, torch.nan, 1.0).sum(), {}


def test_a_loss_that_is_not_a_number_is_told_with_its_rows(overrides):
    config = load("ppo_trainer", [*overrides, *GAE, "critic.nnodes=1"]).config
    critic = RemoteBackend(Here(partial(learning_critic, config)), Ranks(), None, 1.0, 4, "critic.nnodes")
    batch = tiny_batch(vocabulary=12)
    batch = batch.replace(row_ids=torch.arange(len(batch)) + 10)
    with pytest.raises(NonFiniteLoss, match=r"because of rows 11\. All that the loss .* is finite") as told:
        critic.forward_backward(batch, ["values"], SpoiltLoss(11), MicroBatching(rows=1))
    assert told.value.rows == [11]


def test_tensors_travel_as_they_are():
    tensors = [
        torch.randn(3, 2).bfloat16(),
        torch.tensor(4.0),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.ones(2, 3).T,
    ]
    for tensor in tensors:
        found = unpack_tensor(*pack_tensor(tensor))
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert list(buckets({}, 5)) == [] and list(buckets({"a": 9}, 5)) == [["a"]]


@pytest.mark.parametrize(
    ("words", "roles", "said"),
    [
        (GAE, ["critic"], ""),
        ([], [], "no effect: grpo needs no critic"),
        ([*GAE, "trainer.runtime=local"], ["critic"], "local, but the critic model asks for machines of its own"),
        ([*GAE, "trainer.record_steps=[1]"], ["critic"], "trainer.record_steps stores what one process learns"),
        ([*GAE, "critic.tensor_parallel_size=2"], ["critic"], "2 does not divide the 1 devices"),
        ([*GAE, "critic.n_gpus_per_node=3"], ["critic"], "cannot be shared by 3 ranks"),
    ],
)  # fmt: skip
def test_who_has_machines_and_what_does_not_go_together(overrides, words, roles, said):
    loaded = load("ppo_trainer", [*overrides, "critic.nnodes=1", *words])
    assert list(resource_pools(loaded.config)) == roles
    told = [str(finding) for finding in check(loaded)]
    assert (
        any(said in one for one in told)
        if said
        else not any("machines of" in one or "pool" in one for one in told)
    )
