"""Fused modules: used where kernel and module agree, left alone where not. The kernels themselves need a GPU."""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3 import modeling_qwen3

from strop.models import fused_modules, patches
from strop.models.patches import patch_for_device
from strop.models.residual import widen_residual

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "gemma": (GemmaForCausalLM, GemmaConfig),
}


def rms_norm(x, weight, eps, out=None):
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)).to(
        out or x.dtype
    )


def wrong_gradient(gate, up):
    return F.silu(gate) * up + (up - up.detach())


PLAIN = {
    "rms_norm": rms_norm,
    "rotary": apply_rotary_pos_emb,
    "gated_silu": lambda gate, up: F.silu(gate) * up,
}


@pytest.fixture
def stand_ins(monkeypatch):
    """Plain torch in the place of the kernels, on the CPU; counts what is called."""
    calls = dict.fromkeys(PLAIN, 0)

    def counted(name, function):
        def call(*arguments, **options):
            calls[name] += 1
            return function(*arguments, **options)

        return call

    def use(**others):
        made = SimpleNamespace(
            **{name: counted(name, function) for name, function in {**PLAIN, **others}.items()}
        )
        monkeypatch.setattr(fused_modules, "_kernels", lambda: made)

    monkeypatch.setattr(fused_modules, "DEVICES", ("cpu",))
    monkeypatch.setattr(fused_modules, "_checked", {})
    monkeypatch.setattr(patches, "_rotary_users", Counter())
    for home in (modeling_llama, modeling_qwen3, modeling_gemma):
        monkeypatch.setattr(home, "apply_rotary_pos_emb", home.apply_rotary_pos_emb)  # put back afterwards
    return SimpleNamespace(calls=calls, use=use)


def make(kind):
    torch.manual_seed(0)
    model, config = KINDS[kind]
    return model(config(**SMALL))


def learned(model):
    model.zero_grad()
    logits = model(input_ids=torch.arange(14).view(2, 7)).logits
    logits.float().square().mean().backward()
    return [logits.detach(), *(weight.grad.clone() for weight in model.parameters())]


def kernels_in(model):
    return sum(getattr(type(part), "runs_as_kernel", False) for part in model.modules())


@pytest.mark.parametrize("kind, count", [("llama", 7), ("qwen3", 11), ("gemma", 0)])
def test_modules_that_agree_are_fused(stand_ins, kind, count):
    stand_ins.use()
    model = make(kind)
    before, names = learned(model), list(model.state_dict())
    patch_for_device(model)
    stand_ins.calls.update(dict.fromkeys(PLAIN, 0))
    after = learned(model)
    assert kernels_in(model) == count and list(model.state_dict()) == names
    # Gemma adds one to its weights and gates with another function, so only its rotary embedding is the usual one.
    assert stand_ins.calls == {
        "rms_norm": 0 if kind == "gemma" else count - 2,
        "gated_silu": min(count, 2),
        "rotary": 2,
    }
    for a, b in zip(before, after):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    patch_for_device(model)
    assert kernels_in(model) == count, "a second time changes nothing"


def test_a_kernel_with_another_gradient_is_not_used(stand_ins):
    stand_ins.use(gated_silu=wrong_gradient)
    model = make("llama")
    patch_for_device(model)
    assert kernels_in(model) == 5


def test_a_kernel_that_does_not_run_is_told_and_not_used(stand_ins):
    def broken(*_, **__):
        raise RuntimeError("no such instruction")

    stand_ins.use(rms_norm=broken)
    model = make("llama")
    with pytest.warns(UserWarning, match="plain torch does its work: RuntimeError: no such instruction"):
        patch_for_device(model)
    assert kernels_in(model) == 2


def test_a_copy_has_weights_of_its_own(stand_ins):
    stand_ins.use()
    model = make("llama")
    patch_for_device(model)
    twin = copy.deepcopy(model)
    expected = learned(model)[0]
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert torch.equal(learned(twin)[0], expected)


def test_a_wide_residual_stream_leaves_the_norm_narrow(stand_ins):
    stand_ins.use()
    model = make("llama").to(torch.bfloat16)
    assert widen_residual(model)
    before = learned(model)
    patch_for_device(model)
    assert kernels_in(model) == 7
    for a, b in zip(before, learned(model)):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_nothing_happens_on_a_cpu():
    model = make("llama")
    patch_for_device(model)
    assert kernels_in(model) == 0


# --- on a GPU ----------------------------------------------------------------------------------------------------------------

DEVICE = torch.device("cuda")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


@on_gpu
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 0.0)], ids=["float32", "bfloat16"]
)
def test_pieces_of_a_decoder_round_where_plain_torch_rounds(dtype, tolerance):
    from strop.models.kernels import gated_silu, rms_norm, rotary

    torch.manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE, dtype=dtype)

    norm = LlamaRMSNorm(896).to(DEVICE, dtype)
    norm.weight.data.normal_()
    x = randn(3, 7, 896)
    # A sum in another order may round the other way, rarely.
    assert (
        (norm(x) - rms_norm(x, norm.weight, norm.variance_epsilon)).abs() > tolerance
    ).float().mean() < 1e-3
    q, k, cos, sin = (
        randn(3, 5, 6, 64).transpose(1, 2),
        randn(3, 5, 2, 64).transpose(1, 2),
        randn(3, 5, 64),
        randn(3, 5, 64),
    )
    for expected, found in zip(apply_rotary_pos_emb(q, k, cos, sin), rotary(q, k, cos, sin), strict=True):
        assert (expected - found).abs().max() <= tolerance
    gate, up = randn(3, 5, 77), randn(3, 5, 77)
    assert (F.silu(gate) * up - gated_silu(gate, up)).abs().max() <= tolerance


@on_gpu
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("kind, count", [("llama", 7), ("qwen3", 11), ("gemma", 0)])
def test_a_model_with_kernels_learns_the_same(kind, count, dtype, tolerance):
    model = make(kind).to(DEVICE, dtype)
    ids = torch.randint(40, (5, 33), device=DEVICE)

    def learn():
        model.zero_grad()
        logits = model(input_ids=ids).logits.float()
        logits.square().mean().backward()
        return [logits.detach(), *(weight.grad.float().clone() for weight in model.parameters())]

    before = learn()
    patch_for_device(model)
    assert kernels_in(model) == count
    for a, b in zip(before, learn()):
        assert (a - b).norm() <= tolerance * a.norm().clamp(min=1e-6)
