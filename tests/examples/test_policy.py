"""The examples of one's own loop run, and the GRPO loop has the numbers of the trainer."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from examples.policy import custom_loss, distill, grpo_loop
from strop.policy.policy import Policy
from tests.ppo.runs import run, weights

FAST: dict[str, object] = {"dtype": "float32", "enable_gradient_checkpointing": False}
REWARD = """
from examples.policy.grpo_loop import reward

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return reward(solution_str, ground_truth)
"""


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_grpo_loop_has_the_numbers_of_the_trainer(
    overrides: list[str], task: Path, tmp_path: Path, lora_rank: int
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    trained = run(
        overrides,
        f"custom_reward_function.path={tmp_path}/reward.py",
        f"actor_rollout_ref.model.lora_rank={lora_rank}",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "data.shuffle=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=3",
        "trainer.total_training_steps=3",
        "trainer.seed=1",
    )
    rows = pq.read_table(task / "data" / "train.parquet").to_pylist()
    with Policy(task / "model", lora_rank=lora_rank, lr=3e-3, seed=1, **FAST) as policy:  # type: ignore[arg-type]
        own = list(grpo_loop.train(policy, rows, steps=3))
        for number, metrics in enumerate(own, start=1):
            assert metrics["score"] == pytest.approx(trained[number]["critic/score/mean"], rel=1e-6)
            assert metrics["grad_norm"] == trained[number]["actor/grad_norm"]
            shared = [name for name in metrics if name in trained[number]]
            assert {"actor/pg_loss", "actor/entropy", "training/rollout_logprobs_diff_max"} <= set(shared)
            assert {name: metrics[name] for name in shared} == {
                name: trained[number][name] for name in shared
            }
        ours = policy._core.backend.state_dict()["model"]
        theirs = weights(tmp_path / "run", 3)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_distillation_brings_the_student_to_the_teacher(task: Path) -> None:
    prompts = ["1+2=", "3+4="]
    with (
        Policy(task / "model", **FAST, lr=1e-2, seed=2) as student,  # type: ignore[arg-type]
        Policy(task / "model", **FAST, lr=5e-2) as teacher,  # type: ignore[arg-type]
    ):
        teacher.forward_backward([distill.Datum(student.prompt(text).ids, [5, 6, 7]) for text in prompts],
                                 "cross_entropy")  # fmt: skip
        teacher.optim_step()
        divergences = list(distill.distill(student, teacher, prompts, steps=8))
    assert divergences[0] > 0.05
    assert sum(divergences[-2:]) / 2 < 0.6 * divergences[0]


def test_a_loss_of_ones_own_learns_preferences(task: Path) -> None:
    pairs = [("1+2=", "3", "4"), ("3+4=", "7", "12"), ("5+5=", "10", "9")]
    with Policy(task / "model", lora_rank=4, lr=1e-2, **FAST) as policy:  # type: ignore[arg-type]
        losses = list(custom_loss.train(policy, pairs, steps=8))
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < 0.9 * losses[0]
