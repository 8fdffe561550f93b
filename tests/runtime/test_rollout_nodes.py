"""`rollout.nnodes`: the engine on a Ray node of its own, as in verl's one-step-off and fully asynchronous recipes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from strop.config.compose import load
from strop.errors import STOPPED
from strop.runtime.ray.cluster import RayCluster
from tests.ppo.runs import metrics
from tests.runtime.conftest import STEPS
from tests.runtime.started import Started, assert_near_run, assert_same_run

pytest.importorskip("ray")
from tests.runtime.test_ray import Nodes, started_nodes

ONE_STEP_OFF = "trainer.async_training.enable=true"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes that can hold a rank or a replica each, and a head."""
    with started_nodes() as found:
        yield found


def separated(nodes: Nodes, *more: str) -> list[str]:
    """The keys of verl's recipes."""
    address = f"ray_kwargs.ray_init.address={nodes.cluster.address}"
    sizes = ["trainer.nnodes=1", "trainer.n_gpus_per_node=1", "rollout.nnodes=1", "rollout.n_gpus_per_node=1"]
    return [address, *sizes, *more]


def raylet_of(run: Started, title: str, nodes: Nodes) -> int:
    """The node of an actor, as its place in `nodes.workers`."""
    pid = run.child(title, nodes.raylets())
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return nodes.raylets().index(parent)


@pytest.mark.slow
def test_an_engine_on_its_own_node_learns_what_one_process_learns(nodes, settings, tmp_path):
    calm = Started([*settings, ONE_STEP_OFF], tmp_path / "calm")
    assert calm.end() == 0, calm.said()
    run = Started([*settings, *separated(nodes, ONE_STEP_OFF)], tmp_path / "run")
    run.wait_for(lambda beat: beat.step == 3)
    replica = raylet_of(run, "RolloutReplica", nodes)
    ranks = raylet_of(run, "RankLauncher", nodes)
    assert replica != ranks
    assert raylet_of(run, "ReplicaManager", nodes) == ranks  # it must survive the loss of a replica's node
    assert run.end() == 0, run.said()
    # A replica has other batches than an engine beside the trainer, so its log-probs differ in the last bit.
    assert_near_run(calm.folder, run.folder, STEPS)
    found = metrics(run.folder)
    assert all(found[step]["rollout/weights_bytes"] > 0 for step in found if step)
    assert found[STEPS]["staleness/max"] == 1


@pytest.mark.slow
def test_a_signal_saves_a_run_with_replicas_and_the_same_command_goes_on(nodes, settings, tmp_path):
    """Ray's own handler of SIGTERM in a rank that is connected to the cluster would end it without a checkpoint."""
    calm = Started(settings, tmp_path / "calm")
    assert calm.end() == 0, calm.said()
    run = Started([*settings, *separated(nodes)], tmp_path / "run")
    run.wait_for(lambda beat: beat.step == 3)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == STOPPED, run.said()
    again = Started([*settings, *separated(nodes)], tmp_path / "run")
    assert again.end() == 0, again.said()
    assert_same_run(calm.folder, run.folder, STEPS, besides=("training/rollout_",))


@pytest.mark.slow
def test_a_killed_rollout_node_is_replaced_and_changes_nothing(nodes, settings, tmp_path):
    settings = [*settings, "trainer.total_training_steps=30"]
    calm = Started(settings, tmp_path / "calm")
    assert calm.end() == 0, calm.said()
    run = Started([*settings, *separated(nodes)], tmp_path / "run")
    run.wait_for(lambda beat: beat.step == 4)
    nodes.kill(raylet_of(run, "RolloutReplica", nodes))
    assert run.end() == 0, run.said()
    steps = max(metrics(calm.folder))
    assert_same_run(calm.folder, run.folder, steps, besides=("training/rollout_",))
    assert metrics(run.folder)[steps]["rollout/replicas_replaced"] >= 1


@pytest.mark.slow
def test_a_killed_rollout_node_without_another_ends_the_run(nodes, settings, tmp_path):
    settings = [*settings, "trainer.total_training_steps=300", "trainer.ray_wait_register_center_timeout=15"]
    run = Started([*settings, *separated(nodes)], tmp_path / "run")
    run.wait_for(lambda beat: beat.step == 4)
    lost = nodes.workers.pop(raylet_of(run, "RolloutReplica", nodes))
    try:
        nodes.cluster.remove_node(lost, allow_graceful=False)
        start = time.monotonic()
        assert run.end() != 0
        assert time.monotonic() - start < 120
    finally:
        nodes.workers.append(nodes.add())
    assert "Replica 0 died, and the cluster had no place for another within" in run.said()
    assert "Traceback" not in run.said()


@pytest.mark.slow
def test_a_replica_that_cannot_be_built_is_an_error_and_no_lost_machine(nodes, settings, tmp_path):
    """It would fail again, so the run is not started again (`trainer.max_restarts`)."""
    from strop.ppo.roles import replica_spec

    loaded = load("ppo_trainer", [*settings, *separated(nodes), f"trainer.default_local_dir={tmp_path}/run"])
    spec = replica_spec(loaded.config)
    spec = replace(spec, model=replace(spec.model, path=f"{tmp_path}/none"))
    with (
        RayCluster(loaded.config, loaded.tree(), spec) as cluster,
        pytest.raises(ValueError, match=r"A worker cannot start: .*path='.*/none' does not exist.$"),
    ):
        cluster.run("strop.trainer.main_ppo", [])


@pytest.mark.slow
def test_too_few_nodes_for_rollouts_are_told(nodes, settings, tmp_path):
    more = [*separated(nodes), "rollout.nnodes=2", "trainer.ray_wait_register_center_timeout=2"]
    loaded = load("ppo_trainer", [*settings, *more, f"trainer.default_local_dir={tmp_path}/run"])
    from strop.ppo.roles import replica_spec

    start = time.monotonic()
    with (
        RayCluster(loaded.config, loaded.tree(), replica_spec(loaded.config)) as cluster,
        pytest.raises(ValueError) as refused,
    ):
        cluster.run("strop.trainer.main_ppo", [])
    assert time.monotonic() - start < 60
    assert (
        "actor_rollout_ref.rollout: The run asks for 2 machine(s) with 1 CPU each, which are in use. It has "
        "taken 1 machine(s) with 1 CPU each for trainer." in str(refused.value)
    )
    assert "lower actor_rollout_ref.rollout.nnodes or actor_rollout_ref.rollout.n_gpus" in str(refused.value)
