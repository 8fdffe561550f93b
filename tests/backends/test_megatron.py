"""megatron-core on the CPU; what the ranks test is in test_conformance.py and ranks_megatron.py."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_a_run_in_which_a_rank_was_killed_starts_again(overrides, tmp_path):
    (tmp_path / "cpu.py").write_text(
        "from tests.backends.megatron_cpu import without_cuda\n\nwithout_cuda()\n"
    )
    actor = "actor_rollout_ref.actor"
    words = [
        *(word for word in overrides if "default_local_dir" not in word),
        SAVE_AT_ONCE,
        f"{actor}.strategy=megatron",
        f"{actor}.megatron.tensor_model_parallel_size=2",
        f"{actor}.megatron.dtype=float32",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        "trainer.max_restarts=1",
        f"plugins=[{tmp_path}/cpu.py]",
    ]
    run = Started(words, tmp_path / "run")
    run.kill(lambda beat: beat.step == 3 and beat.rank == 1)
    assert run.end(400) == 0, run.said()
    assert "Rank 1 of 2" in run.said() and "was ended by SIGKILL" in run.said()
    assert "Starting again from step 2; 0 restart(s) left." in run.said()
