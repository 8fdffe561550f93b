"""Runs that replay the experts of the rollout engine (R3), as one of several ranks; started by
test_router_replay.py."""

from __future__ import annotations

import pytest

from tests.backends.megatron_cpu import without_cuda
from tests.backends.ranks import here
from tests.backends.ranks_megatron import fitting
from tests.backends.ranks_megatron_runs import KEYS, report_gap, save_experts, words
from tests.runtime.ranks_loop import alone, assert_alike, fit, folder, settings  # noqa: F401


@pytest.fixture(autouse=True)
def on_cpu():
    without_cuda()


RUNS = {
    "fsdp": [],
    "tensor": [*KEYS, *words("tensor")],
    "expert": [*KEYS, *words("expert")],
    "tensor-expert": [*KEYS, *words("tensor-expert")],
    "tensor-pipeline": [*KEYS, *words("tensor-pipeline")],
}


@pytest.mark.parametrize("way", RUNS)
def test_runs_with_the_experts_of_the_engine(way, settings, folder):  # noqa: F811
    """R3, with two epochs per step: the numbers of one process."""
    if way != "fsdp":
        fitting(way)
    if here().is_rank0:
        save_experts(folder)
    common = [*settings, f"actor_rollout_ref.model.path={folder}/experts"]
    common += ["actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.router_replay.mode=R3"]
    one = alone(common, folder / "one")
    many = fit([*common, *RUNS[way]], folder / "many", here())
    report_gap(f"{way} R3", one, many)
    assert_alike(one, many, 4)
