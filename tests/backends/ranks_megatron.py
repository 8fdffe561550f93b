"""megatron-core as one of several ranks, compared with one process; started by test_megatron.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from strop.backends.base import MicroBatching
from strop.backends.megatron.backend import MegatronBackend
from strop.backends.megatron.stage import StageChunk
from strop.config.megatron import devices_per_copy
from strop.config.schema.megatron import MegatronConfig
from strop.models.lora import add_adapters
from strop.models.residual import widen_residual
from strop.planning.megatron import MegatronModel, division_of
from strop.planning.shape import read_shape
from tests.backends.make import make_backend, single
from tests.backends.megatron_cpu import without_cuda
from tests.backends.ranks import here
from tests.backends.ranks_fsdp import assert_trained_alike, weights
from tests.backends.test_conformance import optim, policy_loss
from tests.models.tiny import tiny_batch, tiny_model

divided = partial(make_backend, MegatronBackend, ranks=here())
SIZES = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "virtual": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2},
    "tensor-pipeline": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tensor-context": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    "pipeline-context": {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
    "pipeline-expert": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "tensor-expert": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
}
CASES = [
    *[("llama", way) for way in ("data", "tensor")],
    *[("qwen2", way) for way in SIZES if "expert" not in way],
    *[("qwen3", way) for way in ("tensor", "pipeline")],
    *[("mistral", way) for way in ("data", "context")],
    *[("mixtral", way) for way in ("data", "tensor", "expert", "tensor-expert")],
    *[("qwen3_moe", way) for way in ("pipeline", "context", "expert", "pipeline-expert")],
    *[("deepseek_v3", way) for way in ("data", "tensor", "pipeline", "expert", "context", "tensor-expert")],
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


ADAPTED = [
    *[("qwen2", way) for way in ("data", "tensor", "pipeline", "virtual", "context", "tensor-pipeline")],
    *[("qwen3_moe", way) for way in ("tensor", "expert", "tensor-expert", "pipeline-expert")],
    *[("deepseek_v3", way) for way in ("tensor", "pipeline", "tensor-expert")],
]


def adapted(family: str, **changes: Any) -> Any:
    """A model with adapters that are not 0, of two ranks."""
    torch.manual_seed(5)
    model = add_adapters(tiny_model(family, **changes), rank=4, alpha=8)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("shares", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize(("family", "way"), ADAPTED)
def test_adapters_answer_train_and_merge_as_those_of_peft(family, way, shares):
    """With and without sequence parallelism, where it makes a difference."""
    sizes = fitting(way)
    if not shares and (sizes.tensor_model_parallel_size == 1 or family != "qwen2"):
        pytest.skip("only tensor-parallel ranks share tokens, and with experts they must")
    plain = optim(optimizer="SGD", lr=0.5)
    layers = {"num_hidden_layers": 4} if way == "virtual" else {}
    one = single(adapted(family, **layers), optim=plain)
    many = divided(adapted(family, **layers), optim=plain, megatron=replace(sizes, sequence_parallel=shares))
    assert all(".lora_" in name for name in many.weights.masters)
    held = sum(place.part.parameter.numel() for place in many.adapters.places.values())
    shape = read_shape(tiny_model(family, **layers).config.to_dict())
    planned = MegatronModel(shape, division=division_of(sizes, here().world), lora_rank=4)
    assert planned.trained_here == max(here().all_gather_object(held))
    micro = MicroBatching(rows=2)
    off = []
    for backend in (one, many):
        with backend.reference():
            off.append(backend.forward(tiny_batch(), ["log_probs"], micro).log_probs)
    on = [b.forward(tiny_batch(), ["log_probs"], micro).log_probs for b in (one, many)]
    assert (off[0] - off[1]).abs().max() <= 4e-6 and (on[0] - on[1]).abs().max() <= 4e-6
    assert (on[0] - off[0]).abs().max() > 0.01
    before = weights(one)
    assert_trained_alike(one, many)
    moved = max((weight - before[name]).abs().max() for name, weight in weights(many).items())
    assert moved > 1e-3
    ours, theirs = many.state_dict()["model"], one.state_dict()["model"]
    assert list(ours) == list(theirs)
    one.load_state_dict(one.state_dict())  # the names and shapes of one process


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_of_other_modules_are_refused(target):
    model = add_adapters(
        tiny_model("llama", tie_word_embeddings=False), rank=2, alpha=4, target_modules=["q_proj", target]
    )
    with pytest.raises(ValueError, match=rf"not for .*{target}\. Leave it out of model.target_modules"):
        divided(model, optim=optim())


def test_a_residual_stream_in_float32_stays_so_in_bf16():
    model = tiny_model()
    assert widen_residual(model)
    one = single(model, optim=optim(), compute=torch.bfloat16)
    many = divided(tiny_model(), optim=optim(), compute=torch.bfloat16, fp32_residual=True)
    answers = [b.forward(tiny_batch(), ["log_probs"], MicroBatching(rows=1)).log_probs for b in (one, many)]
    assert torch.equal(*answers)


def balance_of(model, batch, coefficient):
    """Megatron's load-balancing loss of every layer, from the router logits of transformers."""
    rows = [
        model(sequence[None, :-1], output_router_logits=True).router_logits for sequence in batch.sequences
    ]
    config, total = model.config, 0.0
    for layer in zip(*rows, strict=True):
        probabilities = torch.cat(layer).float().softmax(-1)
        chosen = probabilities.topk(config.num_experts_per_tok).indices
        counts = chosen.flatten().bincount(minlength=config.num_experts)
        share = counts / counts.sum()
        total = total + coefficient * config.num_experts * (share * probabilities.mean(0)).sum()
    return total


@pytest.mark.parametrize("way", ["data", "tensor", "pipeline", "context"])
def test_the_load_balancing_loss_of_each_layer_is_in_the_gradient(way):
    """One micro-batch with all rows, of 46 tokens: none of padding."""
    sizes = fitting(way)
    if here().world > devices_per_copy(sizes):
        pytest.skip("data-parallel ranks balance their own rows")
    batch = tiny_batch([(3, 5), (7, 2), (1, 9), (4, 2), (12, 6)])
    model = tiny_model("qwen3_moe")
    coefficient = 0.5
    kind = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": coefficient}
    many = divided(
        tiny_model("qwen3_moe"), optim=optim(), megatron=replace(sizes, override_transformer_config=kind)
    )

    def zero(outputs, piece):
        return 0.0 * outputs.log_probs.sum(), {}

    many.forward_backward(batch, ["log_probs"], zero, MicroBatching(rows=8))
    balance_of(model, batch, coefficient).backward()
    checked = 0
    for name, master in many.weights.masters.items():
        if not name.endswith("mlp.gate.weight"):
            continue
        found = master.grad.full_tensor() if here().world > 1 else master.grad
        expected = model.get_parameter(name).grad
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), name
        checked += 1
    assert checked


SCALED = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "linear": {"factor": 4.0},
}


@pytest.mark.parametrize("kind", SCALED)
def test_positions_are_scaled_as_transformers_scales_them(kind):
    """Sequences of up to 18 tokens of a model that was trained with 8."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, **SCALED[kind]}
    one = single(tiny_model("qwen2", rope_parameters=rope))
    many = divided(tiny_model("qwen2", rope_parameters=rope))
    unscaled = single(tiny_model("qwen2"))
    answers = [b.forward(tiny_batch(), ["log_probs"], MicroBatching(rows=2)).log_probs for b in (one, many)]
    assert (answers[0] - answers[1]).abs().max() <= 4e-6
    plain = unscaled.forward(tiny_batch(), ["log_probs"], MicroBatching(rows=2)).log_probs
    assert (answers[0] - plain).abs().max() > 1e-2


@pytest.mark.parametrize("way", ["tensor", "expert"])
def test_out_of_memory_is_an_error_that_names_the_rank(way, monkeypatch):
    """Ranks are in the middle of each other's exchanges and cannot start over. The next update is whole."""
    sizes = fitting(way)
    plain = optim(optimizer="SGD", lr=0.1)
    many = divided(tiny_model("qwen3_moe"), optim=plain, megatron=sizes)

    def full(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(StageChunk, "run", full)
        ranks = rf"Rank {here().rank} of {here().world} \(pipeline stage 0 of 1, tensor-parallel rank .*\)"
        own = rf"{ranks} is out of memory with micro-batches of 2 rows \(the largest has \d+ tokens\)"
        with pytest.raises(ValueError, match=own):
            many.forward_backward(tiny_batch(), ["log_probs"], policy_loss, MicroBatching(rows=2))
    assert many.out_of_memory == 0
    assert_trained_alike(single(tiny_model("qwen3_moe"), optim=plain), many)


def test_one_rank_goes_on_with_smaller_micro_batches(monkeypatch):
    if here().world > 1:
        pytest.skip("for one rank")
    plain = optim(optimizer="SGD", lr=0.1)
    many = divided(tiny_model("qwen3_moe"), optim=plain)
    run = StageChunk.run

    def small(self, inputs, *more):
        if inputs.ids.shape[1] > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, inputs, *more)

    monkeypatch.setattr(StageChunk, "run", small)
    one = single(tiny_model("qwen3_moe"), optim=plain)
    found, expected = (
        b.forward_backward(tiny_batch(), ["log_probs"], policy_loss, MicroBatching(rows=5))
        for b in (many, one)
    )
    assert many.out_of_memory > 0 and found == pytest.approx(expected, rel=1e-5)
