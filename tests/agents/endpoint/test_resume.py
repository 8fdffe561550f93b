"""The trainer is killed in the middle of an episode of an agent that rewrites its context; the run resumes exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ppo.runs import metrics, same, weights

ROOT = Path(__file__).parents[3]
AGENT = """
import json, os, signal, sys, urllib.request
def chat(episode, messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    key = {"Authorization": "Bearer " + episode["api_key"]}
    with urllib.request.urlopen(urllib.request.Request(episode["base_url"] + "/chat/completions", body, key)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
for count, line in enumerate(sys.stdin):
    episode = json.loads(line)
    first = chat(episode, episode["messages"])
    if count == int(sys.argv[1]):
        os.kill(os.getppid(), signal.SIGKILL)
    chat(episode, [{"role": "user", "content": "1+1="}])  # not a continuation: a second sequence
    print(json.dumps({"id": episode["id"], "score": len(first) % 3}), flush=True)
"""


def train(folder: Path, overrides: list[str], kill_at: int) -> int:
    """Run the trainer in a process of its own; its exit status. `kill_at`: an episode of this process, or -1."""
    command = f"{sys.executable} -S -E {folder.parent / 'agent.py'} {kill_at}"
    words = [
        *overrides,
        f"trainer.default_local_dir={folder}",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.resume_mode=auto",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=3",
        f"actor_rollout_ref.rollout.agent.command='{command}'",
        "actor_rollout_ref.rollout.agent.service=true",
        "actor_rollout_ref.rollout.agent.reward=file",
        "actor_rollout_ref.rollout.agent.max_concurrency=1",  # the same batches in the engine
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "strop.cli", "ppo", *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, -9), done.stdout[-1500:] + done.stderr[-3000:]
    return done.returncode


@pytest.mark.slow
def test_a_killed_run_with_an_agent_from_outside_resumes_exactly(
    tmp_path: Path, overrides: list[str]
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(whole, overrides, -1) == 0
    assert train(killed, overrides, 2 * 6 + 4) == -9, "in the third step"
    assert train(killed, overrides, -1) == 0
    assert same(weights(whole, 3), weights(killed, 3))
    step = metrics(whole)[3]
    assert step["agent/branches"] == 6 and step["agent/failed"] == 0 and step["actor/grad_norm"] > 0
    assert step["critic/score/mean"] == metrics(killed)[3]["critic/score/mean"]
