"""LoRA layers with kernels: a CPU has none of them, names and undo hold, and on a GPU bits do not depend on
rows."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.models.changes import subclass, undo_changes
from strop.models.forward import response_outputs
from strop.models.fused_modules import RUNS_AS_KERNEL
from strop.models.lora import adapted_layers, add_adapters, only_adapter
from strop.models.lora_gpu import fused_projection, layers
from strop.models.nf4.layers import quantize_layers
from strop.models.patches import applied_patches, patch_for_device, sampling_patches, undo_patches
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine, borrowed_model
from strop.types import Batch
from tests.models.test_patches import gpu  # noqa: F401


def in_sixteen_bits(model):
    """On the GPU, with adapters in float32 as peft keeps them."""
    for name, weight in model.named_parameters():
        if "lora_" not in name and weight.is_floating_point():
            weight.data = weight.data.bfloat16()
    return model.to("cuda")


def adapted(nf4=False, **sizes):
    torch.manual_seed(0)
    usual = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, tie_word_embeddings=False, **(usual | sizes))
    base = LlamaForCausalLM(config)
    if nf4:
        quantize_layers(base, base.model)
    model = add_adapters(base, rank=8, alpha=16)
    for layer in adapted_layers(model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    return model


def test_a_model_with_adapters_gets_them_and_gives_them_back(gpu, monkeypatch):  # noqa: F811
    """On the stand-in of a GPU. Tensors of a CPU go through peft's own forward."""
    monkeypatch.setattr(layers, "kernels_of_lora", lambda: object())
    model = adapted()
    expected = model(torch.tensor([[1, 2, 3]])).logits
    kinds = [type(layer) for layer in adapted_layers(model)]
    names = list(model.state_dict())
    patch_for_device(model, only=["lora_linear"])
    assert applied_patches(model) == ["lora_linear"]
    assert all(type(layer).runs_as_kernel for layer in adapted_layers(model))
    assert list(model.state_dict()) == names
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, expected)
    undo_patches(model)
    assert [type(layer) for layer in adapted_layers(model)] == kinds


class PlainKernels:
    """The formulas of the kernels in plain torch."""

    calls = 0

    @classmethod
    def add_lora_to_all(cls, base, x, a, b, scale, sizes):
        cls.calls += 1
        pairs = zip(a.split(len(a) // len(sizes)), b.split(sizes), strict=True)
        return base + scale * torch.cat([x @ one.t() @ other.t() for one, other in pairs], -1)


@pytest.fixture
def together(monkeypatch):
    """A model with adapters whose layers are computed together, on a CPU, and the groups of layers."""
    monkeypatch.setattr(layers, "kernels_of_lora", lambda: PlainKernels)
    monkeypatch.setattr(fused_projection, "kernels_of_lora", lambda: PlainKernels)
    monkeypatch.setattr(fused_projection, "plain_adapter", lambda layer, x: only_adapter(layer))
    monkeypatch.setattr(PlainKernels, "calls", 0)
    model = adapted().requires_grad_(False)
    for layer in adapted_layers(model):
        layer.__class__ = layers._fused_class(type(layer))
    for part in model.modules():
        if hasattr(part, "gate_proj"):
            part.__class__ = subclass(type(part), type(part).forward, RUNS_AS_KERNEL)
    changes = borrowed_model._fused_lora(model, None)
    yield model, changes
    undo_changes(changes)


IDS = torch.tensor([[1, 2, 3, 4]])


def test_layers_of_the_same_states_are_computed_together(together):
    model, changes = together
    found = model(IDS).logits
    assert PlainKernels.calls == 4  # q, k and v, and gate and up, of two layers
    undo_changes(changes)
    assert PlainKernels.calls == 4
    torch.testing.assert_close(found, model(IDS).logits)
    assert PlainKernels.calls == 4


def test_layers_compute_alone_while_their_adapters_are_off_or_are_others(together):
    model, changes = together
    with model.disable_adapter():
        off = model(IDS).logits
    model.add_adapter("other", model.peft_config["default"])
    for layer in adapted_layers(model):
        torch.nn.init.normal_(layer.lora_B["other"].weight, std=0.05)
    model.set_adapter("other")
    other = model(IDS).logits
    assert PlainKernels.calls == 0
    undo_changes(changes)
    torch.testing.assert_close(other, model(IDS).logits)
    with model.disable_adapter():
        torch.testing.assert_close(off, model(IDS).logits)


def test_trained_adapters_are_seen_and_weights_keep_their_names(together):
    """The weights are views into one tensor: an update in place changes what is sampled."""
    model, changes = together
    before = model(IDS).logits
    for layer in adapted_layers(model):
        layer.lora_B["default"].weight.data.mul_(3)
    found = model(IDS).logits
    undo_changes(changes)
    assert not torch.allclose(before, found)
    torch.testing.assert_close(found, model(IDS).logits)
    assert list(model.state_dict()) == list(adapted().state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("inner, out, rank", [(896, 4864, 32), (4864, 896, 32), (1536, 256, 8)])
def test_bits_do_not_depend_on_the_number_of_rows(inner, out, rank):
    torch.manual_seed(1)
    base = torch.nn.Linear(inner, out, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    a = torch.randn(rank, inner, device="cuda") / inner**0.5
    b = torch.randn(out, rank, device="cuda") * 0.1
    kernels = layers.kernels_of_lora()
    rows = torch.randn(6000, inner, device="cuda", dtype=torch.bfloat16)

    def layer(x):
        return kernels.add_lora(layers._base(base, x), x, a, b, 2.0)

    whole = layer(rows)
    for count in (1, 3, 64, 65, 500, 1024, 4096):
        assert torch.equal(layer(rows[:count]), whole[:count]), count
    exact = base(rows).double() + 2.0 * (rows.double() @ a.double().t()) @ b.double().t()
    assert (whole - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.gpu
def test_gradients_are_those_of_peft():
    model = in_sixteen_bits(adapted(hidden_size=256, intermediate_size=2560))
    ids = torch.randint(0, 97, (3, 40), device="cuda")

    def gradients():
        model.zero_grad()
        model(ids).logits.float().logsumexp(-1).mean().backward()
        return {
            name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad
        }

    expected = gradients()
    patch_for_device(model, only=["lora_linear"])
    for name, found in gradients().items():
        assert torch.nn.functional.cosine_similarity(found.flatten(), expected[name].flatten(), 0) > 0.999, (
            name
        )
        assert abs(float(found.norm() / expected[name].norm()) - 1) < 0.02, name


@pytest.mark.gpu
@pytest.mark.parametrize("nf4", [False, True], ids=["lora", "qlora"])
def test_sampled_and_recomputed_log_probs_have_the_same_bits(nf4):
    model = in_sixteen_bits(adapted(nf4, hidden_size=256, intermediate_size=2560))
    engine = NativeEngine(model, max_num_seqs=64)
    prompts = [list(range(3, 3 + 7 * i)) for i in range(1, 9)]
    answers = engine.generate([Request(prompt, n=4, seed=3) for prompt in prompts], Sampling(max_tokens=60))
    sampled = [(prompt, found) for prompt, group in zip(prompts, answers) for found in group]
    batch = Batch(
        sequences=[torch.tensor([*prompt, *found.ids]) for prompt, found in sampled],
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in sampled]),
        mask=torch.ones(len(sampled), 60),
    )
    with torch.no_grad():
        trained = response_outputs(model, batch, ["log_probs"])["log_probs"].cpu()
    assert "lora_linear" in applied_patches(model)
    assert ("fused_lora" in sampling_patches(model)) is not nf4
    for row, (_, found) in zip(trained, sampled):
        assert (row[: len(found.ids)] - torch.tensor(found.log_probs)).abs().max() < 2e-6
