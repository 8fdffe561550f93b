"""megatron-core on the CPU; what the ranks test is in test_conformance.py and ranks_megatron.py."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from strop.errors import REFUSED
from tests.backends.ranks import pytest_as_ranks
from tests.runtime.started import SAVE_AT_ONCE, Started

HERE = Path(__file__).parent
CONFORMANCE, RANKS = str(HERE / "test_conformance.py"), str(HERE / "ranks_megatron.py")
RUNS = str(HERE / "ranks_megatron_runs.py")
FAST = "tensor-grpo or (balancing and tensor) or qwen2-tensor-sequence"


def test_two_ranks_train_as_one_process():
    pytest_as_ranks(2, [RANKS, RUNS, "-k", FAST])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_pass_the_whole_conformance_suite(world):
    pytest_as_ranks(world, [CONFORMANCE, "-k", "megatron"], timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_way_to_divide_a_model(world):
    pytest_as_ranks(world, [RANKS], timeout=1500)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_runs_are_those_of_one_process(world):
    pytest_as_ranks(world, [RUNS], timeout=3000)


ACTOR = "actor_rollout_ref.actor"
CPU = "from tests.backends.megatron_cpu import without_cuda\n\nwithout_cuda()\n"


def two_ranks(overrides, plugin, *more):
    """Settings of a run of two ranks on the CPU."""
    return [
        *(word for word in overrides if "default_local_dir" not in word),
        SAVE_AT_ONCE,
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.megatron.dtype=float32",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        f"plugins=[{plugin}]",
        *more,
    ]


SHORT = """
import os, time
from pathlib import Path
import torch
from strop.backends.megatron.stage import StageChunk

run, updates = StageChunk.run, 0

def short(self, *inputs):
    global updates
    updates += torch.is_grad_enabled()
    if updates == 6 and os.environ.get("RANK") == "STAGE":  # step 2, the second of four micro-batches
        Path(__file__).with_suffix(".time").write_text(str(time.time()))
        raise torch.OutOfMemoryError("CUDA out of memory")
    return run(self, *inputs)

StageChunk.run = short
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_in_which_a_stage_is_out_of_memory_ends_at_once(stage, overrides, tmp_path):
    """The other stage is in the middle of the schedule. The timeout of collectives is half an hour."""
    (tmp_path / "short.py").write_text(CPU + SHORT.replace("STAGE", str(stage)))
    words = two_ranks(
        overrides,
        tmp_path / "short.py",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.nccl_timeout=1800",
    )
    run = Started(words, tmp_path / "run")
    assert run.end(300) == REFUSED, run.said()
    seconds = time.time() - float((tmp_path / "short.time").read_text())
    print(f"stage {stage}: ended after {seconds:.1f} s")
    assert seconds < 15
    expected = (
        rf"Rank {stage} of 2 \(pipeline stage {stage} of 2, .*\) is out of memory with micro-batches of 8 rows "
        r"\(the largest has \d+ tokens\)\. Set the \*_micro_batch_size_per_gpu of this role to 4\."
    )
    assert re.search(expected, run.said()), run.said()


@pytest.mark.slow
def test_a_run_in_which_a_rank_was_killed_starts_again(overrides, tmp_path):
    (tmp_path / "cpu.py").write_text(CPU)
    tensor = f"{ACTOR}.megatron.tensor_model_parallel_size=2"
    words = two_ranks(overrides, tmp_path / "cpu.py", tensor, "trainer.max_restarts=1")
    run = Started(words, tmp_path / "run")
    run.kill(lambda beat: beat.step == 3 and beat.rank == 1)
    assert run.end(400) == 0, run.said()
    assert "Rank 1 of 2" in run.said() and "was ended by SIGKILL" in run.said()
    assert "Starting again from step 2; 0 restart(s) left." in run.said()
