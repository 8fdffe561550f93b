"""Patches: chosen by name, logged once, undone without a trace, and checked at build time only."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import _StopRecomputationError
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from strop.backends.single import SingleBackend
from strop.config.schema.model import ModelConfig
from strop.models import fused_modules, patches, varlen
from strop.models.build import build_policy
from strop.models.checkpointing import checkpoint_activations
from strop.models.forward import response_outputs
from strop.models.layouts.delta_rule import DELTA_RULE
from strop.models.lora import add_adapters
from strop.models.patches import (
    DEVICE_PATCHES,
    MODEL_PATCHES,
    ROLLOUT_NAMES,
    applied_patches,
    choose_patches,
    patch_for_device,
    undo_patches,
)
from strop.models.residual import narrows
from strop.models.self_check import same
from strop.rollout.native.borrowed_model import ROLLOUT_PATCHES, RolloutPatches
from strop.rollout.native.cpu.decode_attention import NAME as DECODE_ATTENTION
from strop.rollout.native.cpu.packed_linear import PACKED_LINEAR
from tests.models.tiny import tiny_batch, tiny_model
from tests.rollout import tiny as rollout_tiny

IDS = torch.arange(3, 15).view(2, 6)
ON_A_GPU = ["residual_add", "rms_norm", "gated_mlp", "rotary", "flash_attention"]


def rms_norm(x, weight, eps, out=None):
    wide = x.float()
    normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normal).to(out or x.dtype)


class FlashStandIn:
    """The definition, called as the kernels of a GPU are. Counts its calls."""

    LARGEST = 128

    def __init__(self) -> None:
        self.calls = 0

    def packed_attention(self, q, k, v, bounds, longest, *, scale=None, window=None):
        self.calls += 1
        pieces = []
        for a, b in pairwise(bounds.tolist()):
            places = torch.arange(b - a)
            distance = places[:, None] - places
            seen = (distance >= 0) & (distance < (window or b - a))
            q_, k_, v_ = (x[a:b].transpose(0, 1) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=seen, scale=scale, enable_gqa=True)
            pieces.append(out.transpose(0, 1))
        return torch.cat(pieces)


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that is patched like a GPU, with plain torch in the place of kernels."""
    kernels = SimpleNamespace(
        rms_norm=rms_norm, rotary=apply_rotary_pos_emb, gated_silu=lambda gate, up: F.silu(gate) * up
    )
    flash = FlashStandIn()
    plain = FlashStandIn()
    monkeypatch.setattr(fused_modules, "DEVICES", ("cpu",))
    monkeypatch.setattr(fused_modules, "_checked", {})
    monkeypatch.setattr(fused_modules, "_kernels", lambda: kernels)
    monkeypatch.setattr(patches, "_rotary_users", Counter())
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(varlen, "DEVICES", ("cpu",))
    monkeypatch.setattr(varlen, "DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(varlen, "_users", Counter())
    monkeypatch.setattr(varlen, "_load_flash", lambda: flash)
    monkeypatch.setattr(varlen, "plain_kernel", lambda: plain.packed_attention)
    varlen.checked_flash.cache_clear()
    yield SimpleNamespace(flash=flash, plain=plain)
    varlen.checked_flash.cache_clear()


def state_of(model: nn.Module) -> list[object]:
    """Class, attributes and hooks of every part."""
    found: list[object] = [model.config._attn_implementation]
    for name, part in model.named_modules():
        own = {key: value for key, value in vars(part).items() if not key.startswith("_")}
        found.append((name, type(part), own, len(part._forward_hooks)))
    return found


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def save(tmp_path, **changes):
    model = tiny_model(attention_dropout=0.25, **changes)
    model.save_pretrained(tmp_path / "model")
    return ModelConfig(path=str(tmp_path / "model"))


# --- undo -----------------------------------------------------------------------------------------------------


def test_undone_patches_leave_no_trace(gpu):
    model = tiny_model()
    rotary, before, expected = modeling_llama.apply_rotary_pos_emb, state_of(model), logits(model)
    patch_for_device(model)
    assert applied_patches(model) == ON_A_GPU
    assert state_of(model) != before and modeling_llama.apply_rotary_pos_emb is not rotary
    patch_for_device(model)
    assert applied_patches(model) == ON_A_GPU, "a second time changes nothing"
    undo_patches(model)
    assert state_of(model) == before and modeling_llama.apply_rotary_pos_emb is rotary
    assert applied_patches(model) == [] and not any(varlen._users.values())
    assert torch.equal(logits(model), expected)


def test_patches_of_a_build_are_undone_too(tmp_path):
    settings = save(tmp_path)
    policy = build_policy(settings)
    assert applied_patches(policy) == ["attention_function", "no_dropout", "fp32_residual"]
    layer = policy.model.layers[0].self_attn
    assert layer.attention_dropout == 0.0 and narrows(policy.model.norm)
    undo_patches(policy)
    assert layer.attention_dropout == 0.25 and not any(narrows(part) for part in policy.modules())


def test_models_of_one_family_share_the_rotary_function(gpu):
    rotary = modeling_llama.apply_rotary_pos_emb
    first, second = tiny_model(), tiny_model(seed=1)
    for model in (first, second):
        patch_for_device(model)
    undo_patches(first)
    assert modeling_llama.apply_rotary_pos_emb is not rotary, "the other model still uses it"
    undo_patches(second)
    assert modeling_llama.apply_rotary_pos_emb is rotary


def test_a_rotary_function_with_other_arguments_stays(gpu):
    model = rollout_tiny.make("gpt_oss_sinks")
    patch_for_device(model)
    assert "rotary" not in applied_patches(model) and "rms_norm" in applied_patches(model)
    undo_patches(model)


def test_a_sharded_layer_keeps_the_patch_that_it_was_built_on(gpu):
    model = tiny_model()
    choose_patches(model, ["residual_add", "rms_norm"])
    patch_for_device(model)
    expected = logits(model)
    layer = model.model.layers[0]
    layer.__class__ = type("FSDPLayer", (type(layer),), {})
    undo_patches(model)
    assert applied_patches(model) == ["residual_add"]
    assert torch.equal(logits(model), expected)


def test_liger_is_undone(tmp_path, monkeypatch):
    def patched(*, model, fused_linear_cross_entropy):
        model.model.norm.forward = lambda hidden: hidden
        model.model.norm.extra = 1
        modeling_llama.new_name = rms_norm

    monkeypatch.setattr(
        patches, "require", lambda *_, **__: SimpleNamespace(_apply_liger_kernel_to_instance=patched)
    )
    settings = save(tmp_path)
    settings.use_liger = True
    policy = build_policy(settings)
    assert "liger" in applied_patches(policy) and policy.model.norm.extra == 1
    assert modeling_llama.new_name is rms_norm
    undo_patches(policy)
    assert not hasattr(policy.model.norm, "extra") and "forward" not in vars(policy.model.norm)
    assert not hasattr(modeling_llama, "new_name")


# --- choosing -------------------------------------------------------------------------------------------------


def test_auto_off_and_names(gpu, tmp_path):
    settings = save(tmp_path)
    settings.patches = "off"
    off = SingleBackend(build_policy(settings)).module
    assert applied_patches(off) == ["attention_function", "no_dropout"]
    settings.patches = ["rotary", "fp32_residual"]
    some = SingleBackend(build_policy(settings)).module
    assert applied_patches(some) == ["attention_function", "no_dropout", "fp32_residual", "rotary"]
    settings.patches = "auto"
    auto = SingleBackend(build_policy(settings)).module
    assert applied_patches(auto) == ["attention_function", "no_dropout", *ON_A_GPU], "float32 anyway"


def test_the_choice_holds_for_a_model_with_adapters(gpu):
    model = tiny_model()
    choose_patches(model, ["rms_norm"])
    adapted = add_adapters(model, rank=2, alpha=4)
    patch_for_device(adapted)
    assert applied_patches(adapted) == ["rms_norm"]


def test_unknown_names_are_refused(tmp_path):
    settings = save(tmp_path)
    settings.patches = ["rms_nrom"]
    with pytest.raises(ValueError, match=r"'rms_nrom', which is no patch.*rms_norm"):
        build_policy(settings)
    settings.patches = "of"
    with pytest.raises(ValueError, match=r"model.patches='of' must be auto, off or a list of names.*off"):
        build_policy(settings)


def test_patches_are_logged_once(gpu, caplog):
    patches._log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for seed in range(2):
            SingleBackend(tiny_model(seed=seed))
    lines = [record.message for record in caplog.records if "Patches of" in record.message]
    assert lines == [f"Patches of LlamaForCausalLM: {', '.join(ON_A_GPU)}"]


# --- self-checks ----------------------------------------------------------------------------------------------


def test_no_self_check_runs_in_a_pass(gpu, monkeypatch):
    """With gradient checkpointing, a check inside the first layer would take torch's own exceptions for its own."""
    checks = []
    for home in (varlen, fused_modules):
        plain = home.same
        monkeypatch.setattr(home, "same", lambda *ways, plain=plain: checks.append(1) or plain(*ways))
    model = tiny_model()
    checkpoint_activations(model)
    backend = SingleBackend(model)
    assert checks and gpu.plain.calls, "kernels are checked when a model is built"
    made, calls = len(checks), gpu.plain.calls
    backend.module.train().requires_grad_(True)
    outputs = response_outputs(backend.module, tiny_batch(), ["log_probs"])
    outputs["log_probs"].sum().backward()
    assert len(checks) == made and gpu.plain.calls == calls
    assert gpu.flash.calls > 2, "training attends with the kernel that was checked"


def test_heads_that_were_not_checked_use_the_kernel_of_torch(gpu):
    model = tiny_model()
    choose_patches(model, "off")
    patch_for_device(model)
    response_outputs(model, tiny_batch(), ["log_probs"])
    assert gpu.plain.calls and not gpu.flash.calls


def test_a_self_check_takes_no_exception_of_torch_for_a_broken_kernel():
    def stopped():
        raise _StopRecomputationError

    with pytest.raises(_StopRecomputationError):
        same(lambda: [torch.ones(1)], stopped)


# --- rollout --------------------------------------------------------------------------------------------------


def test_rollout_patches_are_listed_and_undone(gpu):
    names = (*(patch.name for patch in ROLLOUT_PATCHES), PACKED_LINEAR.name, DECODE_ATTENTION, DELTA_RULE)
    assert names == ROLLOUT_NAMES
    names = [patch.name for patch in (*MODEL_PATCHES, *DEVICE_PATCHES, *ROLLOUT_PATCHES, PACKED_LINEAR)]
    assert len(set(names)) == len(names)
    model = tiny_model().train()
    patch_for_device(model)
    before, expected = state_of(model), logits(model)
    rollout = RolloutPatches(model)
    for _ in range(2):
        rollout.apply()
        assert not model.training and state_of(model) != before
        assert "forward" in vars(model.model.layers[0].self_attn.q_proj)
        rollout.undo()
        assert state_of(model) == before
    assert torch.equal(logits(model), expected)
