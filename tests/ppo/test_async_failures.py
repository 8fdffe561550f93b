"""What can go wrong while sampling runs ahead: failures end the run with their own words, and a killed run loses no row."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from strop.config.compose import load
from strop.ppo import run_ahead
from strop.ppo.build import build_ppo
from tests import forked
from tests.forked import Forked
from tests.ppo.runs import metrics, run
from tests.ppo.test_async import ASYNC, BESIDE, PARTIAL

QUIET = ["trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1"]


def rollout_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("strop-rollout")]


@pytest.mark.parametrize("more", [[], PARTIAL], ids=["waits", "cuts"])
def test_a_failing_sampler_ends_the_run_with_its_own_error(overrides, more):
    trainer = build_ppo(load("ppo_trainer", [*overrides, *QUIET, *BESIDE, *more]))
    generate, calls = trainer.collector.engine.generate, []

    def fails(requests: Any, sampling: Any) -> Any:
        calls.append(len(requests))
        if len(calls) >= 3:
            raise RuntimeError("the engine is on fire")
        return generate(requests, sampling)

    trainer.collector.engine.generate = fails
    with pytest.raises(RuntimeError, match="the engine is on fire"):
        trainer.fit()
    assert not rollout_threads()


@pytest.mark.parametrize("more", [[], PARTIAL], ids=["waits", "cuts"])
def test_a_failure_of_the_loop_leaves_no_thread_behind(overrides, tmp_path, more):
    """The scorer raises in the second step, while the engine is busy with the third."""
    reward = tmp_path / "broken.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    raise KeyError('no')\n"
    )
    with pytest.raises(ValueError, match="no"):
        run(overrides, *QUIET, *BESIDE, *more, f"custom_reward_function.path={reward}")
    assert not rollout_threads()


def test_close_returns_though_the_engine_hangs(overrides, monkeypatch):
    monkeypatch.setattr(run_ahead, "JOIN_SECONDS", 0.2)
    trainer = build_ppo(load("ppo_trainer", [*overrides, *QUIET, *BESIDE, *PARTIAL]))
    never, generate, calls = threading.Event(), trainer.collector.engine.generate, []

    def hangs(requests: Any, sampling: Any) -> Any:
        calls.append(len(requests))
        if len(calls) > 1:
            never.wait(600)
        return generate(requests, sampling)

    trainer.collector.engine.generate = hangs
    begun = time.time()
    with trainer.output:
        trainer.sync_weights(0)
        trainer.collector.collect(trainer.loader.draw, 8, 1, trainer.output.record(1))
        trainer.close()
    assert time.time() - begun < 300
    never.set()
    for thread in rollout_threads():
        thread.join(60)
    assert not rollout_threads()


def trained_rows(folder: Path, steps: range) -> list[list[int]]:
    return [
        [json.loads(line)["index"] for line in (folder / f"{s}.jsonl").read_text().splitlines()]
        for s in steps
    ]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param([*BESIDE, *PARTIAL, f"{ASYNC}max_policy_age=2"], id="beside"),
        pytest.param(PARTIAL, id="between", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_trains_every_row_once(overrides, tmp_path, mode):
    """Eight steps are one epoch: each of the 64 rows is trained once, in the order of a run that was never killed."""
    long = [*overrides, *QUIET, *mode, "trainer.total_training_steps=8", "trainer.save_freq=1"]
    run(
        long, f"trainer.default_local_dir={tmp_path}/whole", f"trainer.rollout_data_dir={tmp_path}/whole_said"
    )
    killed, said = tmp_path / "killed", tmp_path / "killed_said"
    command = [*long, f"trainer.default_local_dir={killed}", f"trainer.rollout_data_dir={said}"]
    first = Forked("strop.trainer.main_ppo", command, tmp_path / "first.log")
    first.kill_when((killed / "global_step_3").exists)
    assert json.loads((killed / "global_step_3" / "data.json").read_text())["position"] == 24, (
        "rewound to the oldest not trained"
    )
    done = forked.run("strop.trainer.main_ppo", command, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = trained_rows(said, range(1, 9))
    assert rows == trained_rows(tmp_path / "whole_said", range(1, 9))
    assert set(Counter(index for step in rows for index in step).values()) == {4}, (
        "4 samples of each row, once"
    )
    assert sorted(metrics(killed)) == list(range(1, 9))
