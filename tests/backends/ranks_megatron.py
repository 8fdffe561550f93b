"""megatron-core as one of several ranks, compared with one process; started by test_megatron.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from strop.backends.base import MicroBatching
from strop.backends.megatron.backend import MegatronBackend
from strop.config.schema.megatron import MegatronConfig
from strop.models.residual import widen_residual
from strop.run.merge.merge import merge
from tests.backends.make import make_backend, single
from tests.backends.megatron_cpu import without_cuda
from tests.backends.ranks import here
from tests.backends.ranks_fsdp import assert_trained_alike, weights
from tests.backends.test_conformance import optim
from tests.models.tiny import tiny_batch, tiny_model
from tests.ppo.runs import weights as saved_weights
from tests.runtime.ranks_loop import FIVE, PPO, alone, assert_alike, fit, folder, settings  # noqa: F401

divided = partial(make_backend, MegatronBackend, ranks=here())
ACTOR, CRITIC = "actor_rollout_ref.actor.megatron", "critic.megatron"
SIZES = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "virtual": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2},
    "tensor-pipeline": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tensor-context": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    "tensor-expert": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
}
CASES = [
    *[("llama", way) for way in ("data", "tensor")],
    *[("qwen2", way) for way in SIZES if "expert" not in way],
    *[("qwen3", way) for way in ("tensor", "pipeline")],
    *[("mistral", way) for way in ("data", "context")],
    *[("mixtral", way) for way in ("data", "tensor", "expert", "tensor-expert")],
    *[("qwen3_moe", way) for way in ("pipeline", "context", "expert")],
]
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
    ranks = 1
    for name, size in sizes.items():
        if not name.startswith("virtual"):
            ranks *= size
    if here().world % ranks:
        pytest.skip(f"needs a multiple of {ranks} ranks")
    return MegatronConfig(**sizes)


@pytest.mark.parametrize(("family", "way"), CASES)
def test_families_answer_and_train_as_transformers_does(family, way):
    """Biases, norms of heads, tied embeddings (on two stages too), windows, experts; 61 tokens do not divide by 2."""
    sizes = fitting(way)
    plain = optim(optimizer="SGD", lr=0.1)
    layers = {"num_hidden_layers": 4} if way == "virtual" else {}
    one = single(tiny_model(family, **layers), optim=plain)
    many = divided(tiny_model(family, **layers), optim=plain, megatron=sizes)
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
    answers = [b.forward(tiny_batch(), ["log_probs"], MicroBatching(rows=1)).log_probs for b in (one, many)]
    assert torch.equal(*answers)


def words(way: str) -> list[str]:
    return [f"{role}.{name}={size}" for name, size in SIZES[way].items() for role in (ACTOR, CRITIC)]


_by_one = {}


def by_one(algorithm, settings, folder):  # noqa: F811
    if algorithm not in _by_one:
        _by_one[algorithm] = alone([*settings, *ALGORITHMS[algorithm], *FIVE], folder / "one")
    return _by_one[algorithm]


ALGORITHMS = {"grpo": [], "ppo": PPO}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("way", ["data", "tensor", "pipeline", "context", "tensor-pipeline"])
def test_five_steps_are_those_of_one_process(way, algorithm, settings, folder):  # noqa: F811
    fitting(way)
    one = by_one(algorithm, settings, folder)
    many = fit([*settings, *ALGORITHMS[algorithm], *FIVE, *KEYS, *words(way)], folder / "many", here())
    assert_alike(one, many, 5)


def test_a_run_is_resumed_with_other_sizes_and_merged(settings, folder):  # noqa: F811
    """Tensor-parallel, then two stages, then one process."""
    one = alone(settings, folder / "one")
    two = "trainer.total_training_steps=2"
    torn = fit([*settings, *KEYS, *words("tensor"), two], folder / "torn", here())
    assert_alike(one, fit([*settings, *KEYS, *words("pipeline")], torn, here()), 4)
    fewer = fit([*settings, *KEYS, *words("pipeline"), two], folder / "fewer", here())
    assert_alike(one, alone(settings, fewer), 4)
    if here().is_rank0:
        merged = merge(str(torn / "global_step_4" / "actor"), str(folder / "merged")) / "model.safetensors"
        own = saved_weights(torn, 4)
        for name, weight in load_file(merged).items():
            assert torch.allclose(weight.float(), own[name], atol=1e-2)
    here().all_gather_object(None)
