"""Ranks on a cluster: they learn what ranks of one machine learn, and a run survives what happens to its machines."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.config.compose import load
from strop.errors import CRASHED
from strop.run.heartbeat import WorkerState, read_worker_states
from strop.runtime.ray.cluster import RayCluster
from strop.runtime.ray.connection import kept_signal_handlers
from tests.ppo.runs import metrics
from tests.ppo.runs import run as train
from tests.runtime.conftest import STEPS
from tests.runtime.started import Started, assert_near_run, assert_same_run

pytest.importorskip("ray")


def new_cluster(cpus: int) -> Any:
    """The head of a cluster. Nodes install a handler of SIGTERM that stops them and raises SystemExit: pytest would
    take it for the failure of one test and run the others without a head. Without it a SIGTERM ends pytest, and the
    nodes end with it."""
    from ray.cluster_utils import Cluster

    quiet = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    with kept_signal_handlers():
        return Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, **quiet})


class Nodes:
    """A cluster of Ray nodes on this machine, each with one processor to give."""

    def __init__(self) -> None:
        self.cluster = new_cluster(cpus=0)
        self.workers = [self.add(), self.add()]

    def add(self) -> Any:
        with kept_signal_handlers():
            return self.cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)

    def raylets(self) -> list[int]:
        """Process numbers; the workers of a node are its children."""
        return [node.all_processes["raylet"][0].process.pid for node in self.workers]

    def kill(self, place: int) -> None:
        """End a node without a word, and start another."""
        self.cluster.remove_node(self.workers[place], allow_graceful=False)
        self.workers[place] = self.add()


@contextmanager
def started_nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")  # beside other tests, Ray's niceness of 15 takes minutes
        found = Nodes()
        yield found
        found.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with started_nodes() as found:
        yield found


def on(nodes: Nodes, *more: str) -> list[str]:
    return ["trainer.nnodes=2", f"ray_kwargs.ray_init.address={nodes.cluster.address}", *more]


@pytest.mark.slow
def test_a_killed_rank_on_another_machine_changes_nothing(nodes, settings, tmp_path):
    """Two ranks on two nodes learn what one process learns; what becomes of numbers bit for bit is a matter of slow tests."""
    one = tmp_path / "one"
    train(settings, f"trainer.default_local_dir={one}")
    run = Started([*settings, *on(nodes, "trainer.max_restarts=1")], tmp_path / "run")
    beat = run.kill(lambda beat: beat.rank == 1 and beat.step == 4)
    assert run.end() == 0, run.said()
    said = run.said()
    assert re.search(
        rf"Rank 1 of 2 \(host \S+, process {beat.pid}\) was ended by SIGKILL in phase '.*' of step 4", said
    )
    assert "Starting again from step 2; 0 restart(s) left." in said
    assert_near_run(one, run.folder, STEPS)


@pytest.mark.slow
def test_a_killed_node_changes_nothing(nodes, settings, local_run, tmp_path):
    """The run ends with the weights and the numbers of an undisturbed one on one machine, bit for bit."""
    run = Started([*settings, *on(nodes, "trainer.max_restarts=1")], tmp_path / "run")
    beat = run.wait_for(lambda beat: beat.rank == 1 and beat.step == 4)
    os.kill(beat.pid, signal.SIGSTOP)  # a node takes longer to die than a step
    nodes.kill(1)
    with suppress(ProcessLookupError):
        os.kill(beat.pid, signal.SIGCONT)
    assert run.end() == 0, run.said()
    assert re.search(
        r"Rank [01] of 2 \(host \S+, process \d+\) (was lost|waited|lost).* of step 4", run.said()
    )
    assert "Starting again from step 2; 0 restart(s) left." in run.said()
    assert_same_run(local_run, run.folder, STEPS)


@pytest.mark.slow
def test_an_undisturbed_run_is_told_like_one_on_this_machine(nodes, settings, local_run, tmp_path):
    calm = Started(
        [*settings, *on(nodes, f"ray_kwargs.timeline_json_file={tmp_path}/timeline.json")], tmp_path / "calm"
    )
    assert calm.end() == 0, calm.said()
    assert f"step:{STEPS}/{STEPS} - " in calm.said()
    assert_same_run(local_run, calm.folder, STEPS)
    assert (tmp_path / "timeline.json").exists()


@pytest.mark.slow
def test_killing_at_random_moments_changes_nothing(nodes, settings, local_run, tmp_path):
    """Ten workers and three nodes. A run that ends in between is followed by another; all of them end like `local_run`."""
    dice = random.Random(0)
    runs: list[Started] = []

    def living(rank: int) -> tuple[Started, WorkerState]:
        """A rank of the run that is under way."""
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            if not runs or runs[-1].process.poll() is not None:
                runs.append(
                    Started([*settings, *on(nodes, "trainer.max_restarts=30")], tmp_path / f"run{len(runs)}")
                )
            for beat in read_worker_states(runs[-1].folder):
                if beat.rank == rank and not beat.over and Path(f"/proc/{beat.pid}").exists():
                    return runs[-1], beat
            time.sleep(0.02)
        raise AssertionError(runs[-1].said())

    for turn in range(13):
        living(0)
        time.sleep(dice.uniform(0, 8))
        victim = dice.randrange(2)
        run, beat = living(victim)
        nodes.kill(victim) if turn % 4 == 3 else os.kill(beat.pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while Path(f"/proc/{beat.pid}").exists():  # a node takes its workers with it when it is missed
            assert time.monotonic() < deadline, run.said()
            time.sleep(0.1)
    for run in runs:
        assert run.end() == 0, run.said()
        assert_same_run(local_run, run.folder, STEPS)
    assert sum(run.said().count("Starting again") for run in runs) >= 10


@pytest.mark.slow
def test_what_a_cluster_lacks_is_said_in_seconds(nodes, settings, tmp_path, caplog):
    more = [*on(nodes), "trainer.nnodes=4", "trainer.ray_wait_register_center_timeout=2"]
    loaded = load("ppo_trainer", [*settings, *more, f"trainer.default_local_dir={tmp_path}/run"])
    start = time.monotonic()
    with RayCluster(loaded.config, loaded.tree()) as cluster, pytest.raises(ValueError) as refused:
        cluster.run("strop.trainer.main_ppo", [])
    assert time.monotonic() - start < 30
    asked = "The run asks for 4 machine(s) with 1 CPU each, and 2 of 3 can give that"
    assert asked in str(refused.value) and asked in caplog.text
    assert "did not come within trainer.ray_wait_register_center_timeout=2 s. Add machines" in str(
        refused.value
    )


def test_a_cluster_that_is_not_there(settings):
    loaded = load("ppo_trainer", [*settings, "ray_kwargs.ray_init.address=127.0.0.1:1"])
    start = time.monotonic()
    with (
        pytest.raises(
            ValueError, match=r"Cannot reach a Ray cluster at 127.0.0.1:1: \[Errno 111\] Connection refused"
        ),
        RayCluster(loaded.config, loaded.tree()),
    ):
        pass
    assert time.monotonic() - start < 100


TRANSPORT = "actor_rollout_ref.rollout.checkpoint_engine"
SMALL_BUCKETS = f"{TRANSPORT}.update_weights_bucket_megabytes=1"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["naive", "nccl"])
def test_ten_replicas_that_die_change_nothing(nodes, settings, tmp_path, backend):
    """One rank on one node, a replica on the other; the numbers are those of an engine beside the trainer."""
    settings, times = [*settings, "trainer.total_training_steps=60"], 10
    calm = Started(settings, tmp_path / "calm")
    own = [f"ray_kwargs.ray_init.address={nodes.cluster.address}", "actor_rollout_ref.rollout.nnodes=1"]
    run = Started([*settings, *own, f"{TRANSPORT}.backend={backend}"], tmp_path / "run")
    victims: list[int] = []
    dice, after = random.Random(0), 2
    for _ in range(times):
        run.wait_for(lambda beat, after=after: beat.step >= after)
        time.sleep(dice.uniform(0, 0.5))
        victims.append(run.kill_child("RolloutReplica", nodes.raylets(), besides=victims))
        after = max(beat.step for beat in read_worker_states(run.folder)) + 2  # its successor has answered
    assert calm.end() == 0 and run.end() == 0, run.said()
    steps = max(metrics(calm.folder))
    # The log-probs that a replica reports depend on which requests shared its batches, in the last bit; nothing is learnt from them.
    assert_same_run(calm.folder, run.folder, steps, besides=("training/rollout_",))
    found = metrics(run.folder)
    assert found[steps]["rollout/replicas_replaced"] == times
    assert_weights_were_sent(found)


def assert_weights_were_sent(found: dict[int, dict[str, float]]) -> None:
    """In every step, and how long it took was measured."""
    for name in ("rollout/weights_bytes", "rollout/weights_seconds"):
        assert all(found[step][name] > 0 for step in found if step), name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nccl", "file"])
def test_every_transport_brings_the_same_weights(nodes, settings, tmp_path, backend):
    """Two replicas, of which one is killed between updates: the numbers are those of an engine beside the trainer."""
    calm = Started(settings, tmp_path / "calm")
    nodes.workers.append(nodes.add())
    try:
        address = f"ray_kwargs.ray_init.address={nodes.cluster.address}"
        own = [address, "actor_rollout_ref.rollout.nnodes=2", f"{TRANSPORT}.backend={backend}", SMALL_BUCKETS]
        run = Started([*settings, *own], tmp_path / "run")
        run.wait_for(lambda beat: beat.step == 3)
        run.kill_child("RolloutReplica", nodes.raylets())
        assert calm.end() == 0 and run.end() == 0, run.said()
    finally:
        nodes.cluster.remove_node(nodes.workers.pop())
    assert_same_run(calm.folder, run.folder, STEPS, besides=("training/rollout_",))
    found = metrics(run.folder)
    assert found[STEPS]["rollout/replicas_replaced"] == 1
    assert_weights_were_sent(found)
    if backend == "nccl":
        assert sum(found[step]["rollout/weights_regrouped"] for step in found if step) == 1
    else:
        assert not list((run.folder / "weights_on_their_way").iterdir())


@pytest.mark.slow
def test_a_replica_that_dies_in_the_middle_of_an_update_changes_nothing(nodes, settings, tmp_path):
    """The other one, which has received a part or all, ends with the same version; the numbers are those of one process."""
    settings = [*settings, "trainer.total_training_steps=40"]
    calm = Started(settings, tmp_path / "calm")
    nodes.workers.append(nodes.add())
    try:
        address = f"ray_kwargs.ray_init.address={nodes.cluster.address}"
        own = [address, "actor_rollout_ref.rollout.nnodes=2", f"{TRANSPORT}.backend=nccl", SMALL_BUCKETS]
        run = Started([*settings, *own], tmp_path / "run")
        run.wait_for(lambda beat: beat.step >= 3)
        victim, dice = run.child("RolloutReplica", nodes.raylets()), random.Random(0)
        while (
            read_worker_states(run.folder)[0].phase != "update_weights"
        ):  # then it is waited for there, and nowhere else
            os.kill(victim, signal.SIGCONT)
            time.sleep(dice.uniform(0, 0.3))
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.7)
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        now = read_worker_states(run.folder)[0].step
        run.wait_for(lambda beat: beat.step > now)
        assert time.monotonic() - start < 60
        assert calm.end() == 0 and run.end() == 0, run.said()
    finally:
        nodes.cluster.remove_node(nodes.workers.pop())
    assert "The group that broadcasts weights broke, so this version goes through the store" in run.said()
    steps = max(metrics(calm.folder))
    assert_same_run(calm.folder, run.folder, steps, besides=("training/rollout_",))
    found = metrics(run.folder)
    assert found[steps]["rollout/replicas_replaced"] == 1
    assert sum(found[step]["rollout/weights_regrouped"] for step in found if step) == 1


@pytest.mark.slow
def test_frozen_models_on_machines_of_their_own_change_nothing(nodes, settings, task, tmp_path):
    """A reference and a reward model, each on a node of its own and killed once: the numbers are those of one process."""
    from transformers import AutoConfig

    from strop.models.heads import new_scalar_model

    new_scalar_model(AutoConfig.from_pretrained(task / "model")).save_pretrained(tmp_path / "judge")
    models = [
        *(word for word in settings if "custom_reward" not in word),
        "reward_model.enable=true",
        f"reward_model.model.path={tmp_path}/judge",
        f"reward_model.model.tokenizer_path={task}/model",
        "reward_model.model.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.ref.fsdp_config.dtype=float32",
    ]
    pools = [
        "actor_rollout_ref.ref.nnodes=1",
        "reward_model.enable_resource_pool=true",
        "reward_model.nnodes=1",
        "reward_model.n_gpus_per_node=1",
        f"ray_kwargs.ray_init.address={nodes.cluster.address}",
    ]
    calm = Started(models, tmp_path / "calm")
    nodes.workers.append(nodes.add())
    try:
        run = Started([*models, *pools], tmp_path / "run")
        run.wait_for(lambda beat: beat.step >= 2)
        first = run.kill_child("Frozen", nodes.raylets())
        run.kill_child("Frozen", nodes.raylets(), besides=[first])
        assert calm.end() == 0 and run.end() == 0, calm.said() + run.said()
    finally:
        nodes.cluster.remove_node(nodes.workers.pop())
    assert_same_run(calm.folder, run.folder, STEPS)
    assert metrics(run.folder)[STEPS]["actor/kl_loss"] > 0


@pytest.mark.slow
def test_learners_divide_a_critic_and_say_when_one_is_gone(nodes, overrides, monkeypatch):
    """Two of them make the updates that one process makes, from one object in the store."""
    import ray

    from strop.backends.base import MicroBatching
    from strop.ppo.critic_update import CriticUpdate
    from strop.ppo.roles import learning_models, local_critic, remote_critic
    from strop.ranks import Ranks
    from strop.runtime.ray.model_actors import TrainingWorkerLost, start_training_workers
    from strop.shared.build import BackendMaker
    from tests.models.tiny import tiny_batch

    config = load("ppo_trainer", [*overrides, *GAE, "critic.nnodes=2", "trainer.device=cpu"]).config
    batch, micro = tiny_batch(vocabulary=12), MicroBatching(rows=2)
    batch = batch.replace(values=batch.advantages, returns=batch.advantages + 1)
    with kept_signal_handlers():
        ray.init(address=nodes.cluster.address, log_to_driver=False, logging_level="ERROR")
    places, seats = [{"num_cpus": 1}] * 2, [("127.0.0.1", "0")] * 2
    try:
        with start_training_workers(
            "critic", learning_models(config)["critic"], places, seats, "strop", 60
        ) as variables:
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            here = local_critic(config, BackendMaker(torch.device("cpu"), total_steps=4))
            far = remote_critic(config, Ranks(), 1.0, total_steps=4)
            for critic in (here, far):
                critic.reported = critic.forward_backward(
                    batch, ["values"], CriticUpdate(config, width=9).loss(batch, batch), micro
                )
                critic.reported["norm"] = critic.step().grad_norm
                critic.advance_schedule()
            assert far.reported == pytest.approx(here.reported, rel=1e-5)
            torch.testing.assert_close(far.state_dict(), here.state_dict(), rtol=1e-5, atol=1e-6)
            found, expected = (critic.forward(batch, ["values"], micro).values for critic in (far, here))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            os.kill(far._workers.machines[1][1], signal.SIGKILL)
            with pytest.raises(
                TrainingWorkerLost,
                match=r"Training worker 1 of 2 of the critic \(host \S+, process \d+\) is gone",
            ):
                far.forward(batch, ["values"], micro)
    finally:
        ray.shutdown()


GAE = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.ppo_mini_batch_size=4"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "machines"), [(1, 1), (2, 1), (1, 2)])
def test_a_killed_critic_on_machines_of_its_own_changes_nothing(nodes, settings, tmp_path, ranks, machines):
    """As many ranks with a critic among them learn the same: bit for bit where one learner takes the place of one rank, else up
    to the order in which numbers are added."""
    calm = Started([*settings, *GAE, f"trainer.n_gpus_per_node={ranks}"], tmp_path / "calm")
    address = f"ray_kwargs.ray_init.address={nodes.cluster.address}"
    nodes.workers.append(nodes.add())
    try:
        own = [address, f"trainer.nnodes={ranks}", f"critic.nnodes={machines}", "trainer.max_restarts=1"]
        run = Started([*settings, *GAE, *own], tmp_path / "run")
        run.wait_for(lambda beat: beat.step == 4)
        pid = run.kill_child("TrainingWorker", nodes.raylets())
        assert calm.end() == 0 and run.end() == 0, calm.said() + run.said()
    finally:
        nodes.cluster.remove_node(nodes.workers.pop())
    lost = rf"Training worker [01] of {machines} of the critic \(host \S+, process {pid}\) is gone"
    assert re.search(lost, run.said()), run.said()
    assert "Starting again from step 2; 0 restart(s) left." in run.said()
    compare = assert_same_run if ranks == machines == 1 else assert_near_run
    compare(calm.folder, run.folder, STEPS)
    assert metrics(run.folder)[STEPS]["critic/vf_loss"] > 0


@pytest.mark.slow
def test_a_cluster_that_goes_away_is_told_and_leaves_nobody_behind(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = new_cluster(cpus=1)
    try:
        more = ["trainer.total_training_steps=2000", f"ray_kwargs.ray_init.address={cluster.address}"]
        run = Started([*settings, *more], tmp_path / "run")
        worker = run.wait_for(lambda beat: beat.step == 2)
        cluster.head_node.all_processes["gcs_server"][0].process.kill()
        start = time.monotonic()
        assert run.end() == CRASHED, run.said()
        assert time.monotonic() - start < 45
        assert "does not answer any more, so the ranks were stopped. Start the cluster again" in run.said()
        while Path(f"/proc/{worker.pid}").exists() and time.monotonic() - start < 60:
            time.sleep(0.1)
        assert not Path(f"/proc/{worker.pid}").exists()
    finally:
        cluster.shutdown()


def test_a_full_object_store_is_told(monkeypatch):
    import numpy as np
    import ray

    from strop.runtime.ray.replica_pool import RayReplicaPool

    pool = object.__new__(RayReplicaPool)
    pool._ray = ray

    def full(memory):
        raise ray.exceptions.ObjectStoreFullError("full")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(
        ValueError,
        match=r"no room for 3 MiB of weights. Lower .*update_weights_bucket_megabytes, or start Ray",
    ):
        pool.put(np.zeros(3 << 20, np.uint8))


def test_a_successor_waits_for_weights_that_are_on_their_way(monkeypatch):
    """It would sample from the version before; and without a copy of this one it could not sample at all."""
    from strop.rollout.base import EngineDied
    from strop.runtime.ray.replica_pool import ReplicaManager

    keeper = object.__new__(ReplicaManager)
    keeper._incarnations, keeper._replicas, keeper._update_running, keeper._why_no_copy = (
        [0, 0],
        ["a", "b"],
        False,
        "",
    )
    keeper._given_up = {}
    given = []

    def replace(number):
        given.append((number, keeper._version, [box for box, _ in keeper._buckets]))
        keeper._incarnations[number] += 1

    monkeypatch.setattr(keeper, "_replace", replace)
    assert keeper.begin_update(7) == [(0, "a"), (0, "b")]
    assert keeper.restart(1, 0) is None and given == []
    keeper.keep_copy([("box", "contents")], 7, "")
    assert keeper.restart(1, 0) == (1, "b") and given == [(1, 7, ["box"])]
    assert keeper.restart(1, 0) == (1, "b") and len(given) == 1  # many may ask
    keeper._replicas = []
    keeper.load(["half"], "contents", 8, True, False)
    assert keeper.restart(0, 0) is None  # it would lack the other half
    keeper.keep_copy([], 8, "no room")
    with pytest.raises(EngineDied, match="Replica 0 died, and there are no weights for another: no room"):
        keeper.restart(0, 0)


def test_a_replica_without_a_place_is_refused_to_all_who_ask(monkeypatch):
    """Also to those who ask later, and would otherwise send their requests to an actor that never starts."""
    import ray

    from strop.rollout.base import EngineDied
    from strop.runtime.ray.replica_pool import ReplicaManager

    keeper = object.__new__(ReplicaManager)
    keeper._ray, keeper._incarnations, keeper._replicas, keeper._given_up = ray, [0], ["a"], {}
    keeper._deaths, keeper._timeout, keeper._update_running, keeper._why_no_copy = 0, 3.0, False, ""

    def wait_in_vain(replica):
        raise ray.exceptions.GetTimeoutError("not ready")

    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(keeper, "_start_replica", lambda number: "b")
    monkeypatch.setattr(keeper, "_load_current_weights", wait_in_vain)
    for _ in range(2):
        with pytest.raises(EngineDied, match=r"no place for another within .*_timeout=3 s"):
            keeper.restart(0, 0)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["naive", "nccl"])
def test_vllm_replicas_sample_from_the_weights_of_each_step(nodes, settings, tmp_path, transport):
    from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer
    from tests.rollout import engines

    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=128, layers=2).save_pretrained(tmp_path / "model")  # vLLM wants wide heads
    tokenizer.save_pretrained(tmp_path / "model")
    rollout = "actor_rollout_ref.rollout"
    own = [
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"ray_kwargs.ray_init.address={nodes.cluster.address}",
        f"{rollout}.nnodes=1",
        f"{rollout}.name=vllm",
        f"{rollout}.dtype=float32",
        f"{rollout}.enforce_eager=true",
        f"{rollout}.checkpoint_engine.backend={transport}",
        f"+{rollout}.engine_kwargs.vllm.python={engines.vllm_python()}",
    ]
    run = Started([*settings, *own], tmp_path / "run")
    assert run.end(360) == 0, run.said()
    trained = [numbers for step, numbers in metrics(run.folder).items() if step]
    assert len(trained) == STEPS
    for numbers in trained:
        assert numbers["actor/grad_norm"] > 0 and numbers["rollout/weights_bytes"] > 0
        assert numbers["training/rollout_logprobs_diff_max"] < 1e-4
