"""Combinations of parallel sizes on four ranks: ten steps of GRPO and PPO beside those of one process; started by
test_megatron_combinations.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.backends.megatron_cpu import without_cuda
from tests.backends.ranks import here
from tests.backends.ranks_megatron import SIZES
from tests.backends.ranks_megatron_runs import (
    ACTOR,
    ALGORITHMS,
    CRITIC,
    KEYS,
    STEPS,
    TEN,
    by_one,
    largest_gap,
    save,
)
from tests.runtime.ranks_loop import assert_alike, fit, folder, settings  # noqa: F401

MODELS = {
    "dense": None,  # the model of the task, a Qwen2
    # Not Qwen2: the gradient of a key's bias is nearly 0, and Adam makes steps of its roundings.
    "four heads": ("llama", {"num_key_value_heads": 4}),
    "four layers": ("llama", {"num_hidden_layers": 4}),
    "experts": ("qwen3_moe", {}),
}
COMBINATIONS = {
    "TP 4": ("four heads", {"tensor_model_parallel_size": 4}),
    "TP 2 x PP 2": ("dense", SIZES["tensor-pipeline"]),
    "TP 2 x CP 2": ("dense", SIZES["tensor-context"]),
    "PP 2 x CP 2": ("dense", SIZES["pipeline-context"]),
    "TP 2 x EP 2 (Qwen3-MoE)": ("experts", SIZES["tensor-expert"]),
    "PP 2 x EP 2 (Qwen3-MoE)": ("experts", SIZES["pipeline-expert"]),
    "PP 2 of 2 virtual stages each, DP 2": ("four layers", SIZES["virtual"]),
    "TP 2 with sequence_parallel, DP 2 with use_distributed_optimizer": (
        "dense",
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True},
    ),
}


@pytest.fixture(autouse=True)
def on_cpu():
    without_cuda()


def model_words(name: str, place: Path) -> list[str]:
    """The model of actor, reference and critic; written once."""
    made = MODELS[name]
    if made is None:
        return []
    family, changes = made
    if here().is_rank0 and not (place / name).exists():
        save(place / name, family, **changes)
    here().all_gather_object(None)
    return [f"{role}.model.path={place / name}" for role in ("actor_rollout_ref", "critic")]


def optimizer_words(model: str, algorithm: str) -> list[str]:
    """SGD where a few weights have gradients of nearly 0 and Adam makes steps of their roundings: metrics agree to
    3e-6 then too, but such a weight differs by 1.3e-5 of the largest one after ten steps, with any sizes."""
    words = []
    if model == "four layers" or (model, algorithm) == ("experts", "ppo"):
        for role in ("actor_rollout_ref.actor", "critic"):
            words += [f"{role}.optim.optimizer=SGD", f"{role}.optim.lr=0.05"]
    return words


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ten_steps_of_a_combination_are_those_of_one_process(algorithm, combination, settings, folder):  # noqa: F811
    model, sizes = COMBINATIONS[combination]
    common = [*settings, *ALGORITHMS[algorithm], *TEN, *model_words(model, folder.parent)]
    common += optimizer_words(model, algorithm)
    one = by_one((model, algorithm), common, folder)
    divided = [f"{role}.{name}={size}" for name, size in sizes.items() for role in (ACTOR, CRITIC)]
    many = fit([*common, *KEYS, *divided], folder / "many", here())
    if here().is_rank0:
        gap, metric, step = largest_gap(one, many)
        row = {"combination": combination, "algorithm": algorithm, "gap": gap, "metric": metric, "step": step}
        with Path(os.environ["GAPS"]).open("a") as file:
            file.write(json.dumps(row) + "\n")
    assert_alike(one, many, STEPS)
