"""Models with 4-bit weights under adapters: products, what is quantised, sampling, training, resuming, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from strop.backends.base import MicroBatching
from strop.config.schema.model import ModelConfig, OptimConfig
from strop.models.build import adopt_policy, build_critic, build_policy
from strop.models.lora import has_adapters, merge_into_base, merged_weights
from strop.models.nf4.layers import Nf4Linear, dense_weight, is_quantized, quantize_layers
from strop.planning.shape import read_shape
from strop.planning.training import TrainedModel
from strop.rollout.base import Request, Sampling
from strop.rollout.native.engine import NativeEngine
from tests.backends.make import single
from tests.models.tiny import SIZE, tiny_batch

WIDE = {**SIZE, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
MICRO = MicroBatching(rows=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers in bf16."""
    place = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **WIDE))
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.to(torch.bfloat16).save_pretrained(place)
    return place


def settings(folder: Path, **more: Any) -> ModelConfig:
    given = {"path": str(folder), "quantization": "nf4", "lora_rank": 4, "lora_alpha": 8, **more}
    return ModelConfig(enable_gradient_checkpointing=False, **given)


def policy(folder: Path, **more: Any) -> Any:
    """A quantised policy whose adapters have an effect."""
    torch.manual_seed(1)
    model = build_policy(settings(folder, **more))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    return model


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_and_its_gradients_are_those_of_the_dequantised_weights(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 24, bias=bias))
    quantize_layers(model, model)
    layer = model[0]
    assert isinstance(layer, Nf4Linear) and isinstance(layer, nn.Linear)
    plain = nn.Linear(128, 24, bias=bias)
    plain.weight = nn.Parameter(dense_weight(layer, torch.float32))
    plain.bias = layer.bias
    states = torch.randn(3, 5, 128, requires_grad=True)
    above = torch.randn(3, 5, 24)
    inputs = [states, layer.bias] if bias else [states]
    found = torch.autograd.grad(layer(states), inputs, above)
    expected = torch.autograd.grad(plain(states), inputs, above)
    assert torch.equal(layer(states), plain(states))
    assert all(torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in zip(found, expected))


def test_what_is_quantised(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = build_policy(settings(folder))
    quantized = {name for name, part in model.named_modules() if isinstance(part, Nf4Linear)}
    assert has_adapters(model) and len(quantized) == 2 * 7
    assert all(name.endswith("proj.base_layer") for name in quantized)
    assert "of the weights are stored in 4 bits" in caplog.text
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    kinds = {name: weight.dtype for name, weight in model.named_parameters()}
    assert kinds["base_model.model.model.embed_tokens.weight"] == torch.float32
    shape = read_shape({"model_type": "qwen2", **WIDE})
    planned = TrainedModel(shape, lora_rank=4, four_bit=True)
    backend = single(model, compute=torch.bfloat16, optim=OptimConfig())
    held = sum(weight.nbytes for weight in backend.module.parameters())
    held += sum(part.scales.nbytes for part in backend.module.modules() if isinstance(part, Nf4Linear))
    assert held == planned.module


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"without LoRA: 4-bit weights are frozen. Set model.lora_rank"):
        build_policy(settings(folder, lora_rank=0))
    with pytest.raises(ValueError, match=r"4-bit weights are not sharded\. Train on one device"):
        build_policy(settings(folder), weights=False)
    with pytest.raises(ValueError, match="with a module: the weights of its owner would be lost"):
        adopt_policy(AutoModelForCausalLM.from_pretrained(folder), settings(folder))
    narrow = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZE))
    with pytest.raises(ValueError, match="no linear layer whose number of inputs is a multiple of 64"):
        quantize_layers(narrow, narrow.model)


def test_a_critic_keeps_its_head(folder: Path) -> None:
    critic = build_critic(settings(folder))
    assert is_quantized(critic) and type(critic.score) is nn.Linear and critic.score.weight.requires_grad


@pytest.mark.parametrize("tokens", [4, 16], ids=["dequantised per call", "dequantised once"])
def test_sampled_and_recomputed_log_probs_agree(folder: Path, tokens: int) -> None:
    """After eight decode steps a CPU samples from weights that were dequantised once."""
    model = policy(folder)
    backend = single(model, optim=OptimConfig())
    engine = NativeEngine(backend.module, seed=3)
    requests = [Request([5, 9, 11], n=2, seed=1), Request([7, 8], n=1, seed=2)]
    done = engine.generate(requests, Sampling(max_tokens=tokens, ignore_eos=True))
    assert bool(engine.borrowed_model.packed.changes) == (tokens > 8)
    assert all("forward" not in vars(part) for part in model.modules() if isinstance(part, Nf4Linear))
    for request, completions in zip(requests, done):
        for one in completions:
            ids = torch.tensor([[*request.ids, *one.ids]])
            with torch.no_grad():
                logits = backend.module(input_ids=ids, use_cache=False).logits[0, len(request.ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(one.log_probs), expected, atol=2e-5)


def test_rows_with_loaded_adapters(folder: Path) -> None:
    model = policy(folder)
    engine = NativeEngine(single(model, optim=OptimConfig()).module, seed=3)
    draw = torch.Generator().manual_seed(0)
    path = "model.layers.0.mlp.up_proj"
    factors = {f"{path}.lora_A": torch.randn(2, 64, generator=draw)}
    factors[f"{path}.lora_B"] = torch.randn(128, 2, generator=draw)
    engine.load_adapter("mine", factors, 1.0)
    requests = [Request([5, 9], seed=1, adapter="mine"), Request([5, 9], seed=1)]
    own, other = engine.generate(requests, Sampling(max_tokens=6, ignore_eos=True))
    assert own[0].log_probs != other[0].log_probs


def loss(outputs: Any, batch: Any) -> Any:
    value = -(outputs.log_probs * batch.mask).sum()
    return value, {"loss": value.detach()}


def update(backend: Any) -> None:
    backend.forward_backward(tiny_batch(), ["log_probs"], loss, MICRO)
    backend.step()
    backend.advance_schedule()


def test_training_goes_on_exactly_after_loading(folder: Path) -> None:
    def make() -> Any:
        return single(policy(folder), optim=OptimConfig(lr=1e-2))

    first = make()
    before = {name: weight.clone() for name, weight in first.module.named_parameters()}
    update(first)
    state = {part: _copied(value) for part, value in first.state_dict().items()}
    assert all("lora_" in name for name in state["model"])
    update(first)
    second = make()
    second.load_state_dict(state)
    update(second)
    changed = 0
    for (name, weight), other in zip(first.module.named_parameters(), second.module.parameters()):
        assert torch.equal(weight, other), name
        moved = not torch.equal(weight, before[name])
        assert moved == ("lora_" in name), name
        changed += moved
    assert changed == 2 * 2 * 7
    with first.reference():
        base = first.forward(tiny_batch(), ["log_probs"], MICRO).log_probs
    assert not torch.equal(base, first.forward(tiny_batch(), ["log_probs"], MICRO).log_probs)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def test_merged_weights_compute_what_the_policy_computes(folder: Path) -> None:
    model = policy(folder).eval()
    ids = torch.tensor([[5, 9, 11, 3]])
    expected = model(ids).logits
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(merged_weights(model))
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    plain.load_state_dict(weights)
    assert torch.allclose(plain(ids).logits, expected, atol=1e-4)
    merge_into_base(model, "default")
    restored = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert not is_quantized(restored)
    assert torch.allclose(restored(ids).logits, expected, atol=1e-4)
