"""A residual stream in float32 brings a 16-bit model closer to its float32 self, in every family that allows it."""

from __future__ import annotations

import pytest
import torch
import transformers

from strop.models.residual import narrows, widen_residual

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3", "Qwen3Moe"]


def build(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    more = (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "Moe" in family else {}
    )
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def log_probs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of a plain head in float32, which rounds nothing itself."""
    return (model.model(ids)[0].float() @ model.lm_head.weight.float().T).log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_closer_to_float32(family):
    ids = torch.randint(1, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    rounded = build(family).bfloat16().float()  # the same weights, exact arithmetic
    narrow, wide = build(family).bfloat16(), build(family)
    assert widen_residual(wide)
    wide.bfloat16()
    with torch.no_grad():
        exact = log_probs(rounded, ids)
        errors = [(log_probs(model, ids) - exact).abs().mean() for model in (narrow, wide)]
    # Gemma norms what each branch adds, in 16 bits, so less is gained there.
    assert errors[1] < (0.9 if family == "Gemma2" else 0.7) * errors[0], errors


def test_a_model_in_float32_gives_the_very_same_numbers():
    ids = torch.arange(1, 9)[None]
    plain, hooked = build("Llama"), build("Llama")
    widen_residual(hooked)
    assert torch.equal(plain(ids).logits, hooked(ids).logits)
    assert any(narrows(part) for part in hooked.modules()) and not any(
        narrows(part) for part in plain.modules()
    )


def test_gradients_reach_every_weight():
    model = build("Llama")
    widen_residual(model)
    model.bfloat16()
    model(torch.arange(1, 9)[None]).logits.float().log_softmax(-1)[..., 3].sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.dtype == torch.bfloat16 and weight.grad.any(), name


def test_layer_norms_are_left_alone():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    assert not widen_residual(transformers.GPT2LMHeadModel(config))
