"""Experts divided over ranks. What needs several ranks is in ranks_experts.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from strop.backends.fsdp.experts import experts_of, refuse_experts
from tests.backends.ranks import pytest_as_ranks
from tests.models.tiny import tiny_model

RANKS = str(Path(__file__).with_name("ranks_experts.py"))


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("qwen3_moe", 1, None),
        ("qwen3_moe", 64, None),
        ("mixtral", 8, None),
        ("deepseek_v3", 64, None),
        ("qwen3", 1, None),
        ("qwen3", 2, "2, but qwen3 has no experts. Set 1."),
        ("mixtral", 3, "3 does not divide the 8 experts of a layer. Set one of [1, 2, 4, 8]."),
    ],
)
def test_sizes(family: str, size: int, message: str | None) -> None:
    assert refuse_experts(AutoConfig.for_model(family), size) == message


@pytest.mark.parametrize(("family", "layers"), [("qwen3_moe", 2), ("mixtral", 2), ("llama", 0)])
def test_modules_with_all_experts_of_a_layer_are_found(family: str, layers: int) -> None:
    assert len(experts_of(tiny_model(family))) == layers


def test_two_ranks_train_divided_experts_as_one_process_does() -> None:
    pytest_as_ranks(2, [RANKS, "-k", "qwen3_moe-layers or no_token or refused"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_divide_experts_every_way(world: int) -> None:
    pytest_as_ranks(world, [RANKS], timeout=600)
