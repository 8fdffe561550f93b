"""`strop plan` from the command line, and its findings in the preflight."""

from __future__ import annotations

import json

import pytest

from strop.cli import dispatch
from strop.config.compose import load
from strop.planning.advice import advise
from strop.planning.devices import PlannedCluster, device_of
from strop.preflight import device_checks
from strop.preflight.device_checks import examine_memory, local_device, memory_findings
from strop.preflight.report import PreflightReport

MODEL = "actor_rollout_ref.model.path=qwen2.5-7b"


def test_a_plan_that_fits_gives_zero_and_a_table(capsys):
    assert (
        dispatch(["plan", MODEL, "algorithm.adv_estimator=grpo", "--gpu", "h100", "--gpus-per-node=8"]) == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("1 x 8 h100 (79.1 GiB each): actor 7.6B\n")
    for word in ("load", "rollout", "update_actor", "sync", "save", "\nfits\n", "each key alone"):
        assert word in said


def test_a_plan_that_does_not_fit_gives_one_and_says_what_to_set(capsys):
    assert dispatch(["plan", "sft", "model.path=llama-3-8b", "--gpu", "24GiB", "--gpus-per-node", "8"]) == 1
    said = capsys.readouterr().out
    assert "does not fit: update needs" in said and "Set model.fsdp_config.offload_policy=true" in said


@pytest.mark.parametrize("words", [["--help"], ["sft", "--help"], [MODEL, "-h"]])
def test_help_names_gpus_and_options(capsys, words):
    assert dispatch(["plan", *words]) == 0
    said = capsys.readouterr().out
    for word in ("usage: strop plan [ppo|sft|rm|dpo]", "--gpu", "h200", "4090", "80GiB", "--nodes", "--json"):
        assert word in said


def test_adapters_that_fit_are_named(capsys):
    base = ["examples/recipes/base.yaml", "actor_rollout_ref.model.path=qwen2.5-1.5b", "--gpu", "24GiB"]
    assert dispatch(["plan", *base]) == 1
    said = capsys.readouterr().out
    assert "With LoRA it fits these devices: set actor_rollout_ref.model.lora_rank=32." in said
    assert dispatch(["plan", *base, "actor_rollout_ref.model.lora_rank=32"]) == 0
    capsys.readouterr()
    assert dispatch(["plan", "sft", "model.path=qwen2.5-7b", "--gpu", "4090", "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert [change["key"] for change in values["adapters"]] == ["model.lora_rank", "model.quantization"]


def test_values_for_programs(capsys):
    assert dispatch(["plan", MODEL, "--gpu", "h200", "--json", "--nodes", "2", "--gpus-per-node", "8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["nodes"] == 2 and plan["parameters"]["actor"] == 7_615_616_512
    assert {phase["phase"] for phase in plan["phases"]} >= {
        "load",
        "rollout",
        "update_critic",
        "update_actor",
        "save",
    }
    assert all(phase["bytes"] > phase["allocated"] for phase in plan["phases"])
    assert plan["seconds"]["update_actor"] > 0 and plan["knobs"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpu"], "--gpu needs a value"),
        (["--gpu", "h1000"], "no such device"),
        (["--nodes", "0"], "at least 1"),
        (["actor_rollout_ref.model.pth=x"], "no such key"),
        ([], "model.path is not set"),
    ],
)
def test_mistakes_are_answered(words, message):
    with pytest.raises(ValueError, match=message):
        dispatch(["plan", *words])


def advice(gpu, *overrides, per_node=8):
    config = load("ppo_trainer", [MODEL, "algorithm.adv_estimator=grpo", *overrides]).config
    return advise(config, PlannedCluster(device_of(gpu), 1, per_node))


def test_the_preflight_warns_of_micro_batches_and_refuses_what_cannot_run():
    assert memory_findings(advice("h100")) == []
    large = memory_findings(
        advice(
            "h100",
            "actor_rollout_ref.rollout.n=64",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=512",
        )
    )
    assert [finding.level for finding in large] == ["warning"]
    # Passes without gradients follow the size of the actor's.
    assert large[0].key == "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=" in large[0].message
    hopeless = memory_findings(advice("h100", per_node=1))
    assert [finding.level for finding in hopeless] == ["error"] and "would do" in hopeless[0].message
    assert [finding.level for finding in memory_findings(advice("cpu", per_node=1))] == ["warning"]


def test_the_processes_of_a_cpu_share_its_memory(monkeypatch):
    trainer = load("ppo_trainer", ["trainer.device=cpu"]).config.trainer
    whole = local_device(trainer)
    assert whole is not None and whole.is_cpu
    trainer.n_gpus_per_node = 2
    half = local_device(trainer)
    assert half is not None and half.memory == whole.memory // 2


@pytest.mark.parametrize(
    "root, key", [("ppo_trainer", "actor_rollout_ref.model.path"), ("sft_trainer", "model.path")]
)
def test_without_a_gpu_a_large_model_is_sent_to_the_planner(monkeypatch, root, key):
    monkeypatch.setattr(device_checks, "_query_gpu", lambda fields: None)
    monkeypatch.setattr(device_checks, "host_memory", lambda: 24 * 2**30)

    def findings(*overrides):
        report = PreflightReport(root)
        examine_memory(
            load(root, [f"{key}=qwen2.5-7b", "trainer.n_gpus_per_node=8", *overrides]).config, report
        )
        return report.findings

    [found] = findings()
    assert found.level == "warning" and found.key == "trainer.device"
    assert "there is no GPU here" in found.message and "such devices" not in found.message
    assert f"`strop plan {root.partition('_')[0]} ... --gpu NAME`" in found.message
    assert "each of the 8 processes on the CPU would have 3.0 GiB" in found.message
    assert "4090" in found.message and "80GiB" in found.message
    [chosen] = findings("trainer.device=cpu")
    assert "the device has 3.0" in chosen.message


def test_the_gpu_is_asked_of_its_driver(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\necho 'NVIDIA H200, 143771'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    device = local_device(load("ppo_trainer", []).config.trainer)
    assert (
        device is not None
        and not device.is_cpu
        and device.memory == 143771 * 2**20
        and device.bandwidth == 4.8e12
    )


def test_what_cannot_run_is_not_planned():
    uneven = [
        "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
        "--gpu",
        "h100",
        "--gpus-per-node",
        "4",
    ]
    with pytest.raises(ValueError, match="4 devices cannot be divided into engines of 3"):
        dispatch(["plan", MODEL, "algorithm.adv_estimator=grpo", *uneven])
