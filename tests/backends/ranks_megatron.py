"""megatron-core as one of several ranks, compared with one process; started by test_megatron.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.backends.megatron.backend import MegatronBackend
from strop.config.schema.megatron import MegatronConfig
from strop.models.residual import widen_residual
from tests.backends.make import make_backend, single
from tests.backends.megatron_cpu import without_cuda
from tests.backends.ranks import here
from tests.backends.ranks_fsdp import assert_trained_alike, weights
from tests.backends.test_conformance import optim
from tests.models.tiny import tiny_batch, tiny_model
from tests.runtime.ranks_loop import FIVE, PPO, alone, assert_alike, fit, folder, settings  # noqa: F401

divided = partial(make_backend, MegatronBackend, ranks=here())
ACTOR, CRITIC = "actor_rollout_ref.actor.megatron", "critic.megatron"
SIZES = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "tensor-pipeline": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
KEYS = [
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",  # four of them
    f"{ACTOR}.dtype=float32",
    f"{CRITIC}.dtype=float32",
]
MODEL_OUTPUTS = ("log_probs", "entropy", "sum_pi_squared")


@pytest.fixture(autouse=True)
def on_cpu():
    without_cuda()


def fitting(way: str) -> MegatronConfig:
    """The sizes of a way, where the number of ranks allows it."""
    sizes = SIZES[way]
    product = 1
    for size in sizes.values():
        product *= size
    if here().world % product:
        pytest.skip(f"needs a multiple of {product} ranks")
    return MegatronConfig(**sizes)


@pytest.mark.parametrize("way", SIZES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_families_answer_and_train_as_transformers_does(family, way):
    """Biases, norms of heads, tied embeddings (on two stages too), windows; 61 tokens do not divide by 2."""
    sizes = fitting(way)
    plain = optim(optimizer="SGD", lr=0.1)
    one = single(tiny_model(family), optim=plain)
    many = divided(tiny_model(family), optim=plain, megatron=sizes)
    expected, found = weights(one), weights(many)
    assert list(expected) == list(found)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    outputs = [b.forward(tiny_batch(), MODEL_OUTPUTS, MicroBatching(rows=2)) for b in (one, many)]
    for name in MODEL_OUTPUTS:
        gap = (getattr(outputs[0], name) - getattr(outputs[1], name)).abs().max()
        assert gap <= 4e-6, (name, gap)  # log-probs of about 10: two units in the last place
    assert_trained_alike(one, many)


def test_a_residual_stream_in_float32_stays_so_in_bf16():
    model = tiny_model()
    assert widen_residual(model)
    one = single(model, optim=optim(), compute=torch.bfloat16)
    many = divided(tiny_model(), optim=optim(), compute=torch.bfloat16, fp32_residual=True)
    rounded = divided(tiny_model(), optim=optim(), compute=torch.bfloat16)
    answers = [
        b.forward(tiny_batch(), ["log_probs"], MicroBatching(rows=1)).log_probs for b in (one, many, rounded)
    ]
    assert (answers[0] - answers[1]).abs().max() < 0.2 * (answers[0] - answers[2]).abs().max()


def words(way: str) -> list[str]:
    return [f"{role}.{name}={size}" for name, size in SIZES[way].items() for role in (ACTOR, CRITIC)]


_by_one = {}


def by_one(algorithm, settings, folder):  # noqa: F811
    if algorithm not in _by_one:
        _by_one[algorithm] = alone([*settings, *ALGORITHMS[algorithm], *FIVE], folder / "one")
    return _by_one[algorithm]


ALGORITHMS = {"grpo": [], "ppo": PPO}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("way", SIZES)
def test_five_steps_are_those_of_one_process(way, algorithm, settings, folder):  # noqa: F811
    fitting(way)
    one = by_one(algorithm, settings, folder)
    many = fit([*settings, *ALGORITHMS[algorithm], *FIVE, *KEYS, *words(way)], folder / "many", here())
    assert_alike(one, many, 5)
