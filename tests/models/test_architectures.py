"""Architectures whose layers mix tokens in other ways than causal attention: trained with the log-probs of a
plain pass over each sequence, and sampled likewise or refused."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from strop.models.attention import padded_attention
from strop.models.forward import response_outputs
from strop.models.layouts import check
from strop.models.layouts.check import packing_obstacle, runs_packed
from strop.rollout.base import Request, Sampling, build_engine
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native_check import measure_sampling
from strop.types import Batch
from tests.models.hybrids import LATENT, OTHERS, STATEFUL, hybrid
from tests.models.tiny import SIZE, tiny_batch

PACKED = {"lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "kimi_linear", "falcon_h1", "granitemoehybrid"}
PACKED |= {"gpt_oss", "mamba2", "mamba", "falcon_mamba"}
"""Those that run packed, and that the native engine samples from."""
REFUSED = {
    "minimax": "layers of the kind linear_attention",
    "deepseek_v32": "its layers need the attention mask of transformers",
    "llama4_text": "layers of the kind chunked_attention",
    "bloom": "cannot be exchanged",
}
"""What the refusals of the others say."""


def plain_log_probs(model: Any, batch: Batch) -> Tensor:
    """One sequence at a time, as transformers computes it."""
    found = torch.zeros(batch.mask.shape)
    for row, (ids, prompt) in enumerate(zip(batch.sequences, batch.prompt_lengths.tolist(), strict=True)):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1].float()
        picked = logits.log_softmax(-1).gather(-1, ids[prompt:, None])[:, 0]
        found[row, : len(picked)] = picked
    return found


@pytest.mark.parametrize("family", [*STATEFUL, *OTHERS])
@torch.no_grad()
def test_it_trains_on_the_log_probs_of_each_sequence_alone(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    check._log_padded.cache_clear()
    model = hybrid(family)
    batch = tiny_batch()
    expected = plain_log_probs(model, batch)
    with caplog.at_level(logging.INFO, "strop"):
        found = response_outputs(model, batch, ["log_probs"])["log_probs"]
        response_outputs(model, batch, ["log_probs"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    obstacle = packing_obstacle(model)
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=1"):
        runs_packed(model, True, sequence_parallel=True)
    if family in PACKED:
        assert obstacle is None
        return
    assert obstacle is not None
    assert caplog.text.count("runs with padded rows") == 1 and obstacle in caplog.text
    assert f"attn_implementation={padded_attention(model)}" in caplog.text


@torch.no_grad()
def float32_error(model: Any) -> float:
    """How far log-probs of a plain pass in float32 are from those in float64. Layers with a state amplify it: to
    1e-4 in those of Mamba."""
    ids = torch.randint(3, 61, (1, 33), generator=torch.Generator().manual_seed(0))
    single = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    exact = copy.deepcopy(model).double()(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    return float((single - exact).abs().max())


@pytest.mark.parametrize("family", [*STATEFUL, *OTHERS])
def test_it_is_sampled_as_it_is_recomputed_or_refused(family: str) -> None:
    model = hybrid(family)
    if family in PACKED:
        measured = measure_sampling(model)
        limit = 1e-5
        if "mamba" in family:
            limit = max(limit, float32_error(model))
        assert measured.difference is not None and measured.difference < limit, (measured, limit)
        return
    with pytest.raises(ValueError, match=rf"{REFUSED[family]}.*rollout\.name=hf"):
        build_engine("native", model)


def test_sinks_are_trained_packed_as_padded() -> None:
    """gpt-oss: padded rows choose eager attention without being asked for it."""
    model = hybrid("gpt_oss")
    assert padded_attention(model) == "eager"
    batch = tiny_batch()
    gradients = []
    for packed in (True, False):
        model.zero_grad()
        (
            response_outputs(model, batch, ["log_probs"], packed=packed)["log_probs"] * batch.mask
        ).sum().backward()
        sinks = [part.sinks.grad.clone() for part in model.modules() if hasattr(part, "sinks")]
        gradients.append(torch.cat(sinks))
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_a_mask_of_ones_own_is_refused() -> None:
    """Doge selects keys by its values, which no configuration shows, and which later tokens change."""
    config = AutoConfig.for_model("doge", **SIZE)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"cannot be trained.*later tokens change log-probs .* by up to"):
        response_outputs(model, tiny_batch(), ["log_probs"])
    with pytest.raises(ValueError, match=r"rule of its own.*rollout\.name=hf"):
        NativeEngine(model).generate([Request([1, 5, 7])], Sampling(max_tokens=2))


@torch.no_grad()
def test_a_model_that_does_not_pass_the_borders_on_runs_padded() -> None:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("stablelm", **SIZE)).eval()
    found = response_outputs(model, tiny_batch(), ["log_probs"])["log_probs"]
    torch.testing.assert_close(found, plain_log_probs(model, tiny_batch()), atol=1e-5, rtol=1e-5)
    assert "borders of packed sequences" in (packing_obstacle(model) or "")


@pytest.mark.parametrize("change", [{}, {"final": 0.5}], ids=["scaled", "scaled_and_capped"])
@torch.no_grad()
def test_what_a_model_does_to_states_before_its_head_is_done_once(change: dict[str, float]) -> None:
    """MiniCPM3 divides the last hidden states before the head."""
    sizes = {**SIZE, **LATENT, "dim_model_base": 8}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("minicpm3", **sizes)).eval()
    model.lm_head.weight.mul_(20)
    if change:
        cap_logits(model, change["final"])
    batch = tiny_batch()
    expected = plain_log_probs(model, batch)
    found = response_outputs(model, batch, ["log_probs"])["log_probs"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def cap_logits(model: Any, cap: float) -> None:
    """The model's logits become cap tanh(logits / cap)."""
    own = model.forward

    def forward(*given: Any, **options: Any) -> Any:
        output = own(*given, **options)
        output.logits = cap * torch.tanh(output.logits / cap)
        return output

    model.forward = forward
