"""megatron-core on the CPU; what the ranks test is in test_conformance.py and ranks_megatron.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.ranks import pytest_as_ranks

HERE = Path(__file__).parent
CONFORMANCE, RANKS = str(HERE / "test_conformance.py"), str(HERE / "ranks_megatron.py")
FAST = "tensor-grpo"


def test_two_ranks_train_as_one_process():
    pytest_as_ranks(2, [RANKS, "-k", FAST])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_pass_the_whole_conformance_suite(world):
    pytest_as_ranks(world, [CONFORMANCE, "-k", "megatron"], timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_way_to_divide_a_model(world):
    pytest_as_ranks(world, [RANKS], timeout=1500)
