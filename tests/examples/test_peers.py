"""benchmarks/peers: the same task for four frameworks, and their own metrics brought to one form."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from strop.data.make import GSM8K_INSTRUCTION
from strop.rewards.rules.gsm8k import compute_score

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def load(monkeypatch):
    """Imports a script of the folder, and forgets it after the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("so 3 + 4 = 7\n#### 7", 1.0),
        ("#### 1,234", 0.0),
        ("#### 8, no: #### 7", 1.0),
        ("the answer is 7", 0.0),
        ("####7", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_verls_rule_in_all_signatures(load, text, right):
    task = load("task")
    assert task.score(text, "7") == right == compute_score(text, "7", compat="verl")
    assert task.compute_score("openai/gsm8k", text, "7") == right
    prompt = 'What? Output the final answer after "####".'
    found = task.reward_func([prompt + text], [prompt], ["7"])
    assert found["rewards"].tolist() == found["scores"].tolist() == [right]


def test_both_files_have_the_rows_of_whole_shuffled_passes(load, tmp_path):
    import pyarrow.parquet

    task = load("task")
    source = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"What is {n}?", "answer": f"It is.\n#### {n:,}"} for n in range(1000, 1005)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task.write_data(tmp_path / "data", source, source, rows=12, held_out=3, seed=1)
    lines = task.jsonl(tmp_path / "data" / "train.jsonl")
    answers = [line["answer"] for line in lines]
    whole = sorted(str(n) for n in range(1000, 1005))
    assert sorted(answers[:5]) == sorted(answers[5:10]) == whole and answers[:5] != answers[5:10]
    assert lines[0]["prompt"] == f"What is {answers[0]}? {GSM8K_INSTRUCTION}"
    table = pyarrow.parquet.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in table] == [line["prompt"] for line in lines]
    assert task.questions(tmp_path / "data" / "train.parquet") == lines
    assert len(task.jsonl(tmp_path / "data" / "test.jsonl")) == 3


def test_metrics_of_verl_and_strop_become_phases(load):
    found = {
        "timing_s/step": 10.0,
        "timing_s/gen": 5.0,
        "timing_s/old_log_prob": 1.0,
        "timing_s/update_actor": 2.5,
        "timing_s/update_weights": 0.5,
        "response_length/mean": 200.0,
        "critic/score/mean": 0.25,
    }
    lines = [{"step": 3, "data": {**found, "val-core/openai/gsm8k/reward/mean@1": 0.3}}]
    verl = list(load("run_verl").records(lines, samples=8))
    strop = list(load("run_strop").records(lines, samples=8))
    assert verl == strop
    step, evaluation = verl
    assert step["phases"] == {"rollout": 5, "log_probs": 1, "update": 2.5, "weight_sync": 0.5, "other": 1}
    assert (step["tokens"], step["reward"], step["difference_max"]) == (1600, 0.25, None)
    assert evaluation == {"step": 3, "accuracy": 0.3}


def test_lines_of_openrlhf_become_phases(load):
    status = {
        "policy_loss": float("nan"),
        "vllm_kl": -0.002,
        "timing/make_experience": 1.0,
        "timing/ppo_train": 2.0,
        "timing/broadcast": 0.25,
        "rollout/reward_mean": 0.5,
        "rollout/response_length_mean": 100.0,
        "timing/generation": 4.0,
        "timing/step_total": 7.25,
    }
    log = f"(PPOTrainer pid=1) INFO ✨ Global step 2: {status}\n"
    log += "✨ Evaluation completed in 0:00:02, global_step 2, eval_metrics: {'eval_default_pass1': 0.375}\n"
    step, evaluation = load("run_openrlhf").records(log, samples=8)
    assert step["phases"] == {"rollout": 4, "log_probs": 1, "update": 2, "weight_sync": 0.25, "other": 0}
    assert (step["step"], step["seconds"], step["tokens"]) == (2, 7.25, 800)
    assert step["difference_signed_mean"] == -0.002
    assert evaluation == {"step": 2, "accuracy": 0.375}


def test_the_summary_leaves_out_warm_up_but_counts_it_up_to_the_goal(load):
    compare = load("compare")
    step = load("task").step_record
    seconds = [50.0, 4.0, 2.0, 3.0]
    records = [step(i + 1, s, {"rollout": s / 2}, 100, 0.1, difference_max=s) for i, s in enumerate(seconds)]
    records[2:2] = [{"step": 2, "accuracy": 0.3}]
    records += [{"step": 4, "accuracy": 0.4}]
    found = compare.summary(records, warm_up=1, goal=0.35)
    assert found["seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert found["phases"]["rollout"] == found["phases"]["other"] == 1.5
    assert found["seconds_to_0.35"] == 59.0 and compare.summary(records, 1, 0.5)["seconds_to_0.5"] is None
    assert found["accuracy"] == {2: 0.3, 4: 0.4} and found["difference_max"] == 50.0
    with pytest.raises(ValueError, match="4 steps recorded, 4 of them for warm-up"):
        compare.summary(records, warm_up=4, goal=0.35)


def test_a_framework_that_is_not_installed_is_said_and_the_next_one_runs(load, tmp_path):
    save = tmp_path / "found.jsonl"
    words = [
        "--model",
        str(tmp_path),
        "--train",
        "none",
        "--test",
        "none",
        "--save",
        str(save),
        "--steps",
        "1",
    ]
    words += ["--peers", "verl,openrlhf", "--work", str(tmp_path / "work")]
    env = {**os.environ, "PYTHONPATH": ""}
    isolated = tmp_path / "python"
    isolated.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    isolated.chmod(0o755)
    for peer in ("verl", "openrlhf"):
        words += [f"--python-{peer}", str(isolated)]
    subprocess.run([sys.executable, str(FOLDER / "compare.py"), *words], check=True, env=env)
    lines = [json.loads(line) for line in save.read_text().splitlines()]
    assert [(line["peer"], line["skipped"]) for line in lines] == [
        ("verl", "not installed"),
        ("openrlhf", "not installed"),
    ]


def test_verls_metrics_get_the_differences_of_log_probs(load, tmp_path, monkeypatch):
    package = tmp_path / "verl" / "utils" / "debug"
    package.mkdir(parents=True)
    (package / "metrics.py").write_text("def calculate_debug_metrics(data): return {'theirs': 1}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    load("verl_additions")
    metrics = load("verl.utils.debug.metrics")

    class Data:
        batch = {
            "response_mask": torch.tensor([[1, 1, 0]]),
            "old_log_probs": torch.tensor([[-1.0, -2.0, 5.0]]),
            "rollout_log_probs": torch.tensor([[-1.25, -1.25, 0.0]]),
        }

    found = metrics.calculate_debug_metrics(Data())
    assert found == {
        "theirs": 1,
        "training/rollout_log_probs_diff_mean": 0.5,
        "training/rollout_log_probs_diff_max": 0.75,
    }


def test_the_stand_in_packs_rows_and_pads_them_again(load, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "stand_in"))
    padding = load("flash_attn.bert_padding")
    mask = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 1, 1]])
    rows = torch.arange(18.0).reshape(3, 3, 2)
    packed, places, bounds, longest, used = padding.unpad_input(rows, mask)
    assert packed.tolist() == [rows[i, j].tolist() for i, j in mask.nonzero().tolist()]
    assert (bounds.tolist(), longest, used.tolist()) == ([0, 2, 3, 6], 3, [2, 1, 3])
    assert torch.equal(padding.pad_input(packed, places, 3, 3), rows * mask[..., None])


def test_the_stand_in_attends_with_grouped_heads(load, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "stand_in"))
    flash = load("flash_attn")
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) * 0.5
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores, v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(flash.flash_attn_func(q, k, v, softmax_scale=0.5, causal=True), expected)
