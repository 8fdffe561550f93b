"""Profiles of a real step, what nsys is told, and where time goes."""

from __future__ import annotations

import gzip
import json
import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strop.config.compose import load
from strop.run.profile.capture import NSYS_VARIABLE, StepProfiler, nsys_command, nsys_options
from strop.run.profile.report import levers, main, report
from tests import forked


def config(*overrides: str) -> Any:
    return load("ppo_trainer", list(overrides)).config


def trace(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def step(profiling: StepProfiler, number: int) -> None:
    with profiling.phase(number, "step"), profiling.phase(number, "update_actor"):
        torch.ones(64, 64) @ torch.ones(64, 64)


def test_a_trace_of_the_chosen_steps_names_the_phases(tmp_path: Path) -> None:
    profiling = StepProfiler.of(
        config(
            "global_profiler.tool=torch",
            "trainer.profile_steps=[2,4]",
            f"global_profiler.save_path={tmp_path}",
        ),
        0,
    )
    for number in range(1, 6):
        step(profiling, number)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_2_rank_0.json.gz",
        "step_4_rank_0.json.gz",
    ]
    names = trace(tmp_path / "step_2_rank_0.json.gz")
    assert {"strop/step", "strop/update_actor", "aten::mm"} <= set(names)


def test_neighbouring_steps_can_share_a_trace(tmp_path: Path) -> None:
    keys = [
        "global_profiler.tool=torch",
        "global_profiler.steps=[2,3,5]",
        "global_profiler.profile_continuous_steps=true",
    ]
    profiling = StepProfiler.of(config(*keys, f"global_profiler.save_path={tmp_path}"), 0)
    for number in range(1, 6):
        step(profiling, number)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_2_rank_0.json.gz",
        "step_5_rank_0.json.gz",
    ]
    assert trace(tmp_path / "step_2_rank_0.json.gz").count("strop/step") == 2


def test_one_trace_per_phase_of_the_roles_that_are_enabled(tmp_path: Path) -> None:
    keys = [
        "global_profiler.tool=torch",
        "global_profiler.steps=[1]",
        f"global_profiler.save_path={tmp_path}",
        "actor_rollout_ref.actor.profiler.enable=true",
        "actor_rollout_ref.actor.profiler.tool_config.torch.discrete=true",
        "actor_rollout_ref.actor.profiler.tool_config.torch.contents=[cpu,shapes]",
        "actor_rollout_ref.actor.profiler.ranks=[1]",
    ]
    assert StepProfiler.of(config(*keys), 0).tool is None
    profiling = StepProfiler.of(config(*keys), 1)
    with profiling.phase(1, "step"):
        for name in ("gen", "update_actor", "old_log_prob"):
            with profiling.phase(1, name):
                torch.ones(2) + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_1_old_log_prob_rank_1.json.gz",
        "step_1_update_actor_rank_1.json.gz",
    ]


@pytest.mark.parametrize("tool", ["nsys", "torch_memory"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_says_so_and_does_nothing(tool: str, caplog: pytest.LogCaptureFixture) -> None:
    profiling = StepProfiler.of(config(f"global_profiler.tool={tool}", "global_profiler.steps=[1]"), 0)
    step(profiling, 1)
    assert (
        f"global_profiler.tool={tool} does nothing: it looks at a GPU" in caplog.text
        and profiling.tool is None
    )


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    keys = [
        "global_profiler.tool=torch",
        "global_profiler.steps=[1,2]",
        f"global_profiler.save_path={tmp_path}/file",
    ]
    profiling = StepProfiler.of(config(*keys), 0)
    for number in (1, 2):
        step(profiling, number)
    assert caplog.text.count("is switched off") == 1


def test_nsys_gets_the_options_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    keys = [
        "global_profiler.tool=nsys",
        "global_profiler.steps=[3,4]",
        f"global_profiler.save_path={tmp_path}/out",
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(NSYS_VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING):
        assert nsys_command(["python", "-m", "x"], config(*keys)) is None
    assert "`nsys` is not on the PATH" in caplog.text
    fake = tmp_path / "nsys"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    command = nsys_command(["python", "-m", "x"], config(*keys))
    assert (
        command is not None
        and command[:2] == [str(fake), "profile"]
        and command[-3:] == ["python", "-m", "x"]
    )
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=repeat-shutdown:2", "--kill=none"} <= set(
        command
    )
    assert nsys_command(["python"], config("global_profiler.steps=[3]")) is None
    many = config(
        *keys,
        "trainer.nnodes=2",
        "global_profiler.global_tool_config.nsys.controller_nsight_options={stats: 'true'}",
    )
    alone, rank = nsys_command(["python"], many), nsys_command(["python"], many, rank=0)
    assert alone is not None and "--stats=true" in alone
    assert rank is not None and "--stats=true" not in rank and "--capture-range=cudaProfilerApi" in rank
    assert nsys_command(["python"], many, rank=1) is None
    both = config(
        *keys,
        "actor_rollout_ref.actor.profiler.enable=true",
        "actor_rollout_ref.actor.profiler.all_ranks=true",
    )
    assert nsys_command(["python"], both, rank=1) is not None
    monkeypatch.setenv(NSYS_VARIABLE, "1")
    assert nsys_command(["python"], config(*keys)) is None
    assert nsys_options({"trace": "nvtx", "sample": None}, 1) == ["--trace=nvtx"]


def test_the_run_becomes_the_same_command_under_nsys(tmp_path: Path) -> None:
    """With a stand-in for nsys that writes down how it was called."""
    fake = tmp_path / "nsys"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/called\n')
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    keys = ["global_profiler.tool=nsys", "trainer.profile_steps=[1]", f"global_profiler.save_path={tmp_path}"]
    done = forked.run("strop.trainer.main_ppo", keys, tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    called = (tmp_path / "called").read_text().splitlines()
    assert called[0] == "profile" and called[-len(keys) - 2 :] == ["-m", "strop.trainer.main_ppo", *keys]


def test_a_rank_on_a_cluster_starts_itself_again_under_nsys(tmp_path: Path) -> None:
    fake = tmp_path / "nsys"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$STROP_UNDER_NSYS" "$RANK" "$@" > {tmp_path}/called\n')
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    keys = [
        "trainer.runtime=ray",
        "global_profiler.tool=nsys",
        "trainer.profile_steps=[1]",
        f"global_profiler.save_path={tmp_path}",
    ]
    done = forked.run(
        "strop.trainer.main_ppo", keys, tmp_path, PATH=path, RANK="0", WORLD_SIZE="2", STROP_LAUNCHED="1"
    )
    assert done.returncode == 0, done.stderr
    called = (tmp_path / "called").read_text().splitlines()
    assert called[:3] == ["1", "0", "profile"] and called[-len(keys) - 2 :] == [
        "-m",
        "strop.trainer.main_ppo",
        *keys,
    ]


def rows(folder: Path, steps: list[dict[str, float]], settings: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": number, "data": data}) for number, data in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "metrics.config.json").write_text(json.dumps(settings or {}))
    return folder


def test_where_the_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = {
        "timing_s/step": 100.0,
        "timing_s/gen": 90.0,
        "timing_s/reward": 1.0,
        "timing_s/update_actor": 9.0,
    }
    usual = {
        "timing_s/step": 10.0,
        "timing_s/gen": 2.0,
        "timing_s/reward": 6.0,
        "timing_s/update_actor": 1.5,
        "rollout/seconds": 2.0,
    }
    run = rows(
        tmp_path / "run", [{"val-core/a": 1.0}, slow, slow, *[usual] * 6, {**usual, "timing_s/testing": 14.0}]
    )
    found = report(run)
    assert found.steps == 7 and found.step_seconds == 10.0 and found.phases["gen"] == 2.0
    assert found.phases["testing"] == pytest.approx(2.0) and found.phases[
        "(between phases)"
    ] == pytest.approx(0.5)
    assert found.levers[0].what.startswith("scoring") and "num_workers" in found.levers[0].turn
    assert main([str(run)]) == 0
    told = capsys.readouterr().out
    assert told.index("reward ") < told.index("gen ") and "what to change, the largest gain first" in told
    with pytest.raises(ValueError, match="has no training steps"):
        report(rows(tmp_path / "empty", []))


def test_levers_go_by_the_numbers() -> None:
    def first(phases: dict[str, float], metrics: dict[str, float] | None = None, settings: Any = None) -> str:
        found = levers(phases, metrics or {}, settings or {})
        return max(found, key=lambda lever: lever.seconds).turn

    assert "log_prob_micro_batch_size_per_gpu" in first({"old_log_prob": 8.0, "update_actor": 2.0})
    assert "needs no such pass" in first({"old_log_prob": 0.6, "update_actor": 1.0})
    assert "actor.use_kl_loss" in first(
        {"old_log_prob": 0.6, "update_actor": 1.0}, settings={"algorithm": {"use_kl_in_reward": True}}
    )
    assert "partial_rollout" in first({"gen": 10.0}, {"rollout/seconds": 10.0, "rollout/occupancy": 0.2})
    assert (
        "tools"
        in first({"gen": 10.0}, {"rollout/seconds": 3.0})
        == first({"gen": 10.0}, {"rollout/seconds": 3.0, "num_turns/max": 5})
    )
    assert "tools" not in first({"gen": 10.0}, {"rollout/seconds": 3.0, "num_turns/max": 2})
    prompts = {"rollout/seconds": 9.0, "rollout/prefill_share": 0.8}
    assert "enable_prefix_caching" in first({"gen": 9.0}, prompts)
    cached = {"actor_rollout_ref": {"rollout": {"enable_prefix_caching": True}}}
    assert first({"gen": 9.0}, prompts, cached).startswith("shorter prompts")
    assert "enable_gradient_checkpointing=false" in first(
        {"update_actor": 10.0},
        settings={"actor_rollout_ref": {"model": {"enable_gradient_checkpointing": True}}},
    )


def test_a_record_runs_its_phases_inside_the_profile() -> None:
    from strop.algorithms.metrics.training import StepRecord

    seen: list[str] = []

    class Around(SimpleNamespace):
        def __enter__(self) -> None:
            seen.append(f"+{self.name}")

        def __exit__(self, *_: object) -> None:
            seen.append(f"-{self.name}")

    record = StepRecord(around=lambda name: Around(name=name))
    with record.phase("step"), record.phase("gen"):
        assert record.current == "gen"
    assert seen == ["+step", "+gen", "-gen", "-step"] and set(record.seconds) == {"step", "gen"}
    with pytest.raises(KeyError), record.phase("step"), record.phase("reward"):
        raise KeyError
    assert record.current == "reward"


def test_damaged_files_of_a_run_are_no_error(tmp_path: Path) -> None:
    whole = '{"step": 1, "data": {"timing_s/step": 2.0, "timing_s/gen": 1.0, "rollout/prefill_share": 0.9}}\n'
    damage = (
        '{"step": 1e999, "data": {"timing_s/step": 1.0}}\n{"step": 2, "data": {"timing_s/step": "NaN"}}\n{"st'
    )
    (tmp_path / "metrics.jsonl").write_text(whole + damage)
    for config in ('{"trainer":', '{"actor_rollout_ref": [1]}', "[]"):
        (tmp_path / "metrics.config.json").write_text(config)
        found = report(tmp_path)
        assert found.steps == 1 and found.phases["gen"] == 1.0 and found.levers
