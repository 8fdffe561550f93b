"""Tiny models with random weights, for engines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCABULARY = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # Wide enough that the most likely token is not decided by rounding.
    "initializer_range": 0.3,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
}

_HEAD: dict[str, Any] = {"head_dim": 16}
_WIDE = 32  # the narrowest head that every kernel of vLLM takes

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, **_HEAD)),
    "mistral_window": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=5)),
    "gemma2_softcap": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **_SIZES, **_HEAD, sliding_window=5, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**_SIZES, **_HEAD, sliding_window=5, query_pre_attn_scalar=16)
    ),
    "phi": lambda: PhiForCausalLM(PhiConfig(**_SIZES, partial_rotary_factor=0.5)),
    "phi3_window": lambda: Phi3ForCausalLM(Phi3Config(**_SIZES, sliding_window=5)),
    "smollm": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**_SIZES, no_rope_layers=[1, 0])),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4)),
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**_SIZES, **_EXPERTS)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_SIZES, **_HEAD, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
    ),
    "gpt_oss_sinks": lambda: GptOssForCausalLM(
        GptOssConfig(
            **_SIZES,
            **_HEAD,
            sliding_window=5,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    ),
}
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss_sinks")
"""Models whose forward pass asks the device which experts are needed."""


def make(name: str = "llama", wide: bool = False) -> Any:
    torch.manual_seed(0)
    with (
        patch.dict(_SIZES, {"hidden_size": 4 * _WIDE} if wide else {}),
        patch.dict(_HEAD, {"head_dim": _WIDE} if wide else {}),
    ):
        model = MODELS[name]()
    if name == "gemma2_softcap":
        model.set_attn_implementation("eager")  # transformers' sdpa leaves the cap out
    model.eval()
    return model


def with_lora(wide: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        make("qwen2", wide), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    model.eval()
    return model


def fixed(logits: Tensor, wide: bool = False) -> Any:
    """A model whose logits are the same everywhere: all embeddings are ones, no layer adds to them, the head reads one of them."""
    model = make(wide=wide)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = logits
    return model


def plain_log_probs(
    model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Log-probs of all tokens at each position of the answer, by one forward pass of one sequence."""
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *answer]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1)


def assert_log_probs(
    model: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    found: Sequence[float],
    temperature: float = 1.0,
    first: int = 0,
) -> None:
    """`found` are the log-probs of the answer from its token `first` on.

    The model's own rounding is the measure: one pass in float64 says how far float32 is off for these tokens
    on this processor. An engine that sums in another order, or approximates exp, rounds as much again.
    """
    plain = plain_log_probs(model, prompt, answer, temperature)
    exact = plain_log_probs(_in_float64(model), prompt, answer, temperature)
    limit = max(4.0 * float((plain - exact).abs().max()), 1e-5)
    expected = plain.gather(1, torch.tensor(answer)[:, None])[first:, 0]
    assert len(found) == len(answer) - first
    difference = float((torch.tensor(found) - expected).abs().max())
    assert difference < limit, f"log-probs are {difference:.2g} off, rounding explains {limit:.2g}"


def _in_float64(model: Any) -> Any:
    exact = copy.deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # grouped products have no float64
    return exact


def plain_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    answer: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, -1]
        answer.append(int(logits.argmax()))
    return answer
