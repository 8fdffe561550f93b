"""An engine over replicas: work goes to the idle, requests outlive a replica, weights arrive whole and are counted."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from strop.config.compose import load
from strop.config.schema.model import ModelConfig
from strop.models.build import build_policy
from strop.ppo.roles import refuse_lost_head
from strop.ranks import Ranks
from strop.rollout.base import Completion, EngineDied, Request, Sampling
from strop.rollout.buckets import read_bucket
from strop.rollout.external import ModelSource
from strop.runtime.replica_engine import (
    MAX_DEATHS_PER_REQUEST,
    MAX_DEATHS_WITHOUT_ANSWER,
    ReplicaEngine,
    replicas_of_rank,
)
from strop.runtime.rollout_replica import ReplicaSpec, RolloutReplica, WeightFeed, map_file
from strop.runtime.weight_transports import FileTransport, ObjectStoreTransport
from tests.models.tiny import tiny_model

SAMPLING = Sampling(max_tokens=4)


class FakePool:
    """Replicas that answer with their number and the weights they have; `dying` ones fail."""

    def __init__(self, size: int) -> None:
        self.size, self.deaths = size, 0
        self.asked: list[int] = []
        self.lives = [0] * size
        self.dying: set[int] = set()
        self.weights: dict[str, torch.Tensor] = {}
        self.version, self.stamped = 0, 0
        self.held: list[tuple[int, Future]] = []
        self.hold = False
        self.lock = threading.Lock()

    def generate(self, number, request, sampling):
        done: Future = Future()
        with self.lock:
            self.asked.append(number)
        if number in self.dying:
            done.set_exception(EngineDied("gone"))
        elif self.hold:
            self.held.append((number, done))
        else:
            done.set_result([Completion([number], [0.0], "stop", self.version) for _ in range(request.n)])
        return done

    def incarnation(self, number):
        return self.lives[number]

    def wait_for_restart(self, number, life):
        with self.lock:
            if life != self.lives[number]:
                return  # another request has seen to it
            self.lives[number] += 1
            self.deaths += 1
            self.dying.discard(number)

    def put(self, memory):
        return memory.copy()

    def load(self, memory, contents, version):
        for name, weight in read_bucket(contents, torch.from_numpy(memory))[0]:
            self.weights[name] = weight.clone()
        self.version = version
        done: Future = Future()
        done.set_result(None)
        return done

    def set_version(self, version):
        self.version = self.stamped = version

    def abort(self, number):
        for place, done in self.held:
            if place == number:
                done.set_result([Completion([], [], "abort")])

    def replaced(self):
        return self.deaths

    def close(self): ...


@pytest.fixture
def pool():
    return FakePool(3)


@pytest.fixture
def engine(pool, tmp_path):
    made = ReplicaEngine(ModelSource(str(tmp_path), 64, 100), pool, ObjectStoreTransport(pool, 1))
    yield made
    made.close()


def test_ranks_divide_the_replicas():
    assert [replicas_of_rank(5, Ranks(rank, 2)) for rank in range(2)] == [[0, 2, 4], [1, 3]]
    assert [replicas_of_rank(2, Ranks(rank, 4)) for rank in range(4)] == [[0], [1], [0], [1]]


def test_requests_go_to_the_replica_with_the_least_to_do(engine, pool):
    pool.hold = True
    answers = [engine._submit(Request([1], n=n), SAMPLING) for n in (3, 1, 1, 1, 1)]
    assert pool.asked == [0, 1, 2, 1, 2]
    engine.abort()
    assert [answer.result()[0].finish for answer in answers] == ["abort"] * 5


def test_answers_keep_their_order_and_bad_requests_fail_alone(engine):
    found = engine.generate([Request([1], n=2), Request([]), Request([1] * 70), Request([1, 2])], SAMPLING)
    assert [len(one) for one in found] == [2, 1, 1, 1]
    assert [one[0].finish for one in found] == ["stop", "error", "error", "stop"]


def test_requests_outlive_their_replica(engine, pool):
    pool.dying = {0}
    found = engine.generate([Request([1])] * 6, SAMPLING)
    assert [one[0].finish for one in found] == ["stop"] * 6
    numbers = engine.stats()
    assert numbers["replicas_replaced"] == 1 and numbers["repeated_requests"] >= 1
    assert engine.stats()["repeated_requests"] == 0


def test_a_successor_is_not_taken_for_the_one_that_died(engine, pool):
    """All requests of a dead replica fail, some of them when it has a successor already."""
    pool.hold = True
    answers = [engine._submit(Request([1], seed=seed), SAMPLING) for seed in range(9)]
    held, pool.hold = [done for number, done in pool.held if number == 0], False
    assert len(held) == 3
    for done in held:
        done.set_exception(EngineDied("gone"))
        time.sleep(0.2)
    for number, done in pool.held:
        if number:
            done.set_result([Completion([number], [0.0], "stop")])
    assert [answer.result(60)[0].finish for answer in answers] == ["stop"] * 9
    assert pool.replaced() == 1 and engine.stats()["repeated_requests"] == 3


def test_a_request_that_kills_every_replica_is_given_up(engine, pool):
    pool.wait_for_restart = lambda number, life: None
    pool.dying = {0, 1, 2}
    with pytest.raises(EngineDied, match="gone"):
        engine.generate([Request([1])], SAMPLING)
    assert len(pool.asked) == MAX_DEATHS_PER_REQUEST + 1


def test_replicas_that_never_answer_are_given_up_soon(tmp_path, caplog):
    """An engine that does not fit its machine starts well and dies of every request."""
    pool = FakePool(1)
    pool.wait_for_restart = lambda number, life: pool.lives.__setitem__(number, life + 1)
    pool.dying = {0}
    engine = ReplicaEngine(ModelSource(str(tmp_path), 64, 100), pool, ObjectStoreTransport(pool, 1))
    with pytest.raises(EngineDied, match="gone"):
        engine.generate([Request([1])] * 2, SAMPLING)
    assert pool.lives[0] <= MAX_DEATHS_WITHOUT_ANSWER
    told = [
        line for line in caplog.messages if "Replica 0 is gone, its requests are sent again: gone" in line
    ]
    assert len(told) == MAX_DEATHS_WITHOUT_ANSWER
    pool.dying = set()
    assert engine.generate([Request([1])], SAMPLING)[0][0].finish == "stop"
    pool.dying = {0}
    with pytest.raises(EngineDied, match="gone"):
        engine.generate([Request([1])], SAMPLING)
    engine.close()


def test_a_pool_that_cannot_mend_tells_why(engine, pool):
    def fail(number, life):
        raise EngineDied("no place for another")

    pool.wait_for_restart, pool.dying = fail, {0, 1, 2}
    with pytest.raises(EngineDied, match="no place for another"):
        asyncio.run(engine.agenerate(Request([1]), SAMPLING))


def test_weights_arrive_bit_for_bit_in_buckets_and_are_counted(engine, pool):
    weights = {
        f"w{i}": torch.randn(300, 257).to(dtype)
        for i, dtype in enumerate([torch.float32, torch.bfloat16] * 4)
    }
    engine.update_weights(iter(weights.items()), 7)
    assert pool.weights.keys() == weights.keys()
    assert all(torch.equal(pool.weights[name], weight) for name, weight in weights.items())
    assert engine.version == pool.version == 7
    numbers = engine.stats()
    assert numbers["weights_bytes"] >= sum(w.numel() * w.element_size() for w in weights.values())
    assert numbers["weights_seconds"] > 0 and engine.stats()["weights_bytes"] == 0
    engine.update_weights((), 8)
    assert pool.stamped == 8 and engine.version == 8


def test_weights_arrive_in_files_that_go_when_the_next_version_is_there(pool, tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "bucket_9_0").write_bytes(b"of a run that was killed")
    there, plain = [], pool.load

    def names():
        return sorted(file.name for file in folder.iterdir())

    def load(path, contents, version):
        there.append(names())
        return plain(np.fromfile(path, np.uint8), contents, version)

    pool.load = load
    engine = ReplicaEngine(ModelSource(str(tmp_path), 64, 100), pool, FileTransport(pool, 1, folder))
    for version in (1, 2):
        weights = {f"w{i}": torch.randn(300, 500) for i in range(4)}
        engine.update_weights(iter(weights.items()), version)
        assert all(torch.equal(pool.weights[name], weight) for name, weight in weights.items())
        assert names() == [f"bucket_{version}_{number}" for number in range(4)]
        assert engine.stats()["weights_bytes"] >= 4 * 300 * 500 * 4
    assert there[0] == ["bucket_1_0"]
    assert there[4] == [
        *there[3],
        "bucket_2_0",
    ]  # whoever is replaced now needs the files of the version before
    engine.close()
    assert not names()


def test_a_folder_that_a_machine_does_not_see_is_named():
    with pytest.raises(
        ValueError, match=r"cannot read new weights from /nowhere/b \(No such file.*engine_kwargs.folder; set"
    ):
        map_file("/nowhere/b")


def test_a_feed_gives_every_weight_once_and_raises_what_the_taker_raises():
    from concurrent.futures import ThreadPoolExecutor, wait

    def take(feed):
        return [name for name, _ in feed]

    with ThreadPoolExecutor(1) as one:
        feed = WeightFeed()
        taken = one.submit(take, feed)
        for number in range(5):
            feed.give([(f"w{number}", torch.zeros(1))], number == 4, taken)
        assert taken.result() == [f"w{n}" for n in range(5)]

        def refuse(feed):
            raise ValueError("no weight 'x'")

        feed = WeightFeed()
        refused = one.submit(refuse, feed)
        wait([refused], 60)
        with pytest.raises(ValueError, match="no weight 'x'"):
            feed.give([("x", torch.zeros(1))], False, refused)


def test_a_replica_finds_relative_paths_of_the_command(task, tmp_path, monkeypatch):
    """Ray starts its workers in the folder of `ray start`."""
    from strop.ppo.roles import replica_spec

    words = [
        "actor_rollout_ref.model.path=model",
        "data.train_files=data/train.parquet",
        "trainer.device=cpu",
        "actor_rollout_ref.rollout.max_model_len=16",
        "actor_rollout_ref.rollout.nnodes=1",
    ]
    monkeypatch.chdir(task)
    spec = replica_spec(load("ppo_trainer", words).config)
    assert spec is not None
    monkeypatch.chdir(tmp_path)
    assert RolloutReplica(spec).engine.version == 0


def test_a_replica_samples_from_the_weights_it_was_given(task):
    """The very tokens and log-probs of an engine beside the trainer."""
    from strop.models.build import build_reference
    from strop.rollout.base import build_engine
    from strop.rollout.external import named_weights

    words = [f"actor_rollout_ref.model.path={task}/model", f"data.train_files={task}/data/train.parquet"]
    model = load("ppo_trainer", words).config.actor_rollout_ref.model
    module = build_reference(model, dtype=torch.float32)
    expected = build_engine("native", module, max_model_len=16).generate(
        [Request([1, 2, 3], n=3, seed=5)], SAMPLING
    )
    replica = RolloutReplica(ReplicaSpec("native", model, {"max_model_len": 16}, "float32", "cpu", False))
    pool, sent = FakePool(1), []
    pool.load = lambda memory, contents, version: sent.append((memory, contents)) or _done()
    sender = ReplicaEngine(ModelSource("nowhere", 16, 100), pool, ObjectStoreTransport(pool, 1))
    sender.update_weights(named_weights(module), 3)

    async def use():
        for memory, contents in sent:
            memory.flags.writeable = False  # as it comes from an object store
            await replica.load(memory, contents, 3)
        assert await replica.ready() == 3
        return await replica.generate(Request([1, 2, 3], n=3, seed=5), SAMPLING)

    found = asyncio.run(use())
    assert [(c.ids, c.log_probs, c.version) for c in found] == [(c.ids, c.log_probs, 3) for c in expected[0]]


@pytest.fixture
def own_head(tmp_path):
    """A model folder with an output head of its own, whose config.json ties it to the embedding."""
    folder = tmp_path / "model"
    tiny_model("qwen2").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    head = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return folder


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_replica_starts_vllm_and_sglang_from_the_configuration_of_the_trainer(
    own_head, monkeypatch, engine
):
    """They build the model themselves: with a tied head they would leave out the head that they are sent, and
    without override_config they would compute other positions."""
    started: list[Path] = []
    monkeypatch.setattr(
        "strop.rollout.vllm.engine.VllmEngine.__init__", lambda _, model, **__: started.append(Path(model))
    )
    monkeypatch.setattr(
        "strop.rollout.sglang.SglangEngine.__init__", lambda _, model, **__: started.append(Path(model))
    )
    changed = {"max_position_embeddings": 77}
    for model in (
        ModelConfig(path=str(own_head)),
        ModelConfig(path=str(own_head), override_config=changed),
    ):
        ReplicaSpec(engine, model, {}, "float32", "cpu", True).make()
        built = json.loads((started[-1] / "config.json").read_text())
        assert built["tie_word_embeddings"] is False
        assert (built["max_position_embeddings"] == 77) == bool(model.override_config)
        assert (
            load_file(started[-1] / "model.safetensors").keys()
            == load_file(own_head / "model.safetensors").keys()
        )
    tiny_model("qwen2").save_pretrained(own_head)
    ReplicaSpec(engine, ModelConfig(path=str(own_head)), {}, "float32", "cpu", True).make()
    assert started[-1] == own_head  # nothing differs


def test_a_head_that_replicas_would_lose_is_refused_before_they_sample(own_head):
    """transformers finds it in files that are not safetensors while it loads them. Replicas are told no more
    than the configuration."""
    weights = load_file(own_head / "model.safetensors")
    torch.save(weights, own_head / "pytorch_model.bin")
    (own_head / "model.safetensors").unlink()
    words = [f"actor_rollout_ref.model.path={own_head}", "data.train_files=x.parquet", "rollout.nnodes=1"]
    key = "actor_rollout_ref.model.override_config.tie_word_embeddings=false"
    config = load("ppo_trainer", words).config
    module = build_policy(config.actor_rollout_ref.model)
    with pytest.raises(ValueError, match=rf"rollout.nnodes=1: {own_head} .*Set {key}\."):
        refuse_lost_head(config, module)
    refuse_lost_head(load("ppo_trainer", [*words, f"+{key}"]).config, module)


def _done():
    done: Future = Future()
    done.set_result(None)
    return done
