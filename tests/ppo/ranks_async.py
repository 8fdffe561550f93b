"""Sampling ahead of training as one of several ranks; started by test_async_ranks.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.config.compose import load
from strop.ppo.build import build_ppo
from strop.ppo.rank_sharing import PackedTrajectories
from strop.types import Prompt, Trajectory
from tests.backends.ranks import here
from tests.ppo.runs import metrics, same, weights
from tests.ppo.test_async import ASYNC, BESIDE, PARTIAL, numbers


def fit(overrides: list[str], place: Path, *more: str) -> dict[int, dict[str, float]]:
    ranks = here()
    common = ranks.broadcast_object([word for word in overrides if "default_local_dir" not in word])
    world = [
        f"trainer.n_gpus_per_node={ranks.world}",
        f"trainer.default_local_dir={place}",
        "trainer.device=cpu",
    ]
    build_ppo(load("ppo_trainer", [*common, *world, *more]), ranks).fit()
    ranks.all_gather_object(None)
    return metrics(place)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(here().broadcast_object(str(tmp_path)))


def test_age_zero_on_many_ranks_is_the_synchronous_loop(overrides, folder):
    plain = fit(overrides, folder / "plain")
    ahead = fit(overrides, folder / "ahead", *BESIDE, *PARTIAL, f"{ASYNC}max_policy_age=0")
    assert same(weights(folder / "plain", 4), weights(folder / "ahead", 4))
    assert [numbers(plain[step]) for step in range(5)] == [numbers(ahead[step]) for step in range(5)]


def test_ranks_run_ahead_together(overrides, folder):
    steps = fit(overrides, folder / "run", *BESIDE, *PARTIAL, f"{ASYNC}staleness_threshold=1.5")
    assert [steps[step]["staleness/prompts_ahead"] for step in range(1, 5)] == [12, 12, 8, 0]
    assert max(steps[step]["staleness/max"] for step in range(1, 5)) in (1, 2)


def test_ranks_over_sample_together(overrides, folder):
    """Each rank waits for its share; a step has as many prompts as without, and no row comes twice."""
    steps = fit(
        overrides,
        folder / "run",
        "actor_rollout_ref.rollout.over_sampling=1.5",
        "actor_rollout_ref.rollout.max_num_seqs=6",
        f"trainer.rollout_data_dir={folder}/said",
    )
    rows = []
    for step in range(1, 5):
        lines = (folder / "said" / f"{step}.jsonl").read_text().splitlines()
        assert len(lines) == 8 * 4
        rows += [json.loads(line)["index"] for line in lines]
    assert max(rows.count(row) for row in rows) == 4
    assert max(steps[step]["over_sampling/carried_prompts"] for step in range(1, 5)) > 0
    assert steps[4]["staleness/prompts_ahead"] == 0 and steps[4]["staleness/max"] <= 1


def test_parcels_bring_everything():
    prompts = {i: Prompt(i, [1, 2], [], "x") for i in range(3)}
    made = [
        Trajectory(
            prompts[i],
            i,
            [5] * i,
            [1] * i,
            [-0.5] * i,
            "stop",
            3,
            [(2, i), (3, 0)],
            2,
            0.25 * i,
            extras={"a": i},
        )
        for i in range(3)
    ]
    assert list(PackedTrajectories.pack(made, prompts).unpack(prompts)) == made
    assert list(PackedTrajectories.pack([], prompts).unpack(prompts)) == []
