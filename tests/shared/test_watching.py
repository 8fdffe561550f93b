"""A real run is watched: alerts, profiles and heartbeats come out of the loop itself."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from strop.run.doctor import diagnose
from strop.run.heartbeat import start_heartbeat
from strop.run.profile.report import report
from strop.run.watchdog import WatchdogLimits, start_watchdog
from tests.ppo.runs import run
from tests.supervised.runs import make_task, settings, train


def alerts(folder: Path) -> list[dict]:
    path = folder / "alerts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def useless(tmp_path: Path) -> list[str]:
    """A scorer that gives everything the same."""
    (tmp_path / "reward.py").write_text("def compute_score(solution_str):\n    return 0.0\n")
    return [
        f"custom_reward_function.path={tmp_path}/reward.py",
        "trainer.save_freq=6",
        "trainer.test_freq=-1",
    ]


def test_a_run_without_signal_is_told_once_also_over_a_resume(overrides, useless, tmp_path, caplog):
    steps = run(overrides, *useless, "trainer.total_training_steps=6")
    told = {alert["name"]: alert for alert in alerts(tmp_path / "run")}
    assert set(told) == {
        "zero_variance_groups",
        "truncation",
    }  # an untrained model does not know its end token either
    assert told["zero_variance_groups"]["step"] == 5 and told["zero_variance_groups"]["severity"] == "error"
    assert (
        steps[4]["health/alerts"] == 0
        and steps[5]["health/alerts"] == 2
        and steps[5]["health/zero_variance_groups"] == 1
    )
    assert steps[5]["critic/zero_variance_groups"] == 1 and steps[5]["perf/process_memory_gb"] > 0
    resumed = run(overrides, *useless, "trainer.total_training_steps=8")
    assert resumed[8]["health/zero_variance_groups"] == 1 and len(alerts(tmp_path / "run")) == 2
    assert caplog.text.count("zero_variance_groups:") == 1


def test_it_can_be_switched_off(overrides, useless, tmp_path):
    steps = run(overrides, *useless, "trainer.total_training_steps=6", "trainer.health=false")
    assert not (tmp_path / "run" / "alerts.jsonl").exists() and "health/alerts" not in steps[6]


def test_profiled_steps_leave_traces_and_a_run_explains_its_time(overrides, tmp_path):
    run(
        overrides,
        "trainer.profile_steps=[2]",
        "global_profiler.tool=torch",
        f"global_profiler.save_path={tmp_path}/profile",
    )
    (trace,) = (tmp_path / "profile").iterdir()
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"strop/step", "strop/gen", "strop/reward", "strop/update_actor"} <= names
    found = report(tmp_path / "run")
    assert found.steps == 4 and {"gen", "reward", "update_actor"} <= set(found.phases)
    assert sum(found.phases.values()) == pytest.approx(
        found.step_seconds + found.phases.get("testing", 0) + found.phases.get("save_checkpoint", 0), rel=0.05
    )
    assert [report.status for report in diagnose(tmp_path / "run").workers] == ["over"]


def test_supervised_runs_are_watched_too(tmp_path):
    task = tmp_path / "task"
    task.mkdir()
    steps = train("sft", settings(make_task(task), tmp_path / "run", "sft"))
    assert steps[8]["health/alerts"] == 0 and "update" in report(tmp_path / "run").phases


def test_a_phase_that_hangs_is_an_alert_before_it_ends(tmp_path):
    with start_heartbeat(tmp_path) as heart:
        heart.beat(7, "reward")
        with start_watchdog(heart, WatchdogLimits(warning=0.5, timeout=0.0)):
            deadline = time.monotonic() + 60
            while not alerts(tmp_path) and time.monotonic() < deadline:
                time.sleep(0.1)
    (alert,) = alerts(tmp_path)
    assert (
        alert["name"] == "stalled_phase"
        and alert["step"] == 7
        and "The phase reward has been running" in alert["message"]
    )
    assert "test_a_phase_that_hangs" in (tmp_path / "workers" / "rank_0.stacks").read_text()
