"""Quantised weights of the native engine: which layers, how exact, when they are made, and that training never
sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from strop.models.projections.fused import fused_forwards
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.quantization.formats import (
    FORMATS,
    INT8,
    Format,
    format_for,
    plain_quantize_rows,
    product,
)
from strop.rollout.native.quantization.layers import QuantizedLayers
from tests.models.tiny import SIZE
from tests.rollout import tiny
from tests.rollout.test_native import PROMPTS

CPU = torch.device("cpu")


def log_probs(engine: NativeEngine, prompt: list[int]) -> torch.Tensor:
    (group,) = engine.generate([Request(prompt)], Sampling(temperature=0, max_tokens=8))
    assert group[0].finish == "length"
    return torch.tensor(group[0].log_probs)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_rows_are_close_to_what_they_were(form: Format) -> None:
    rows = torch.randn(7, 64) * torch.logspace(-4, 4, 7)[:, None]
    rows[3] = 0
    values, scales = plain_quantize_rows(form, rows)
    again = values.float() * scales[:, None]
    step = 1 / 16 if form.dtype.is_floating_point else 0.5 / 127
    assert ((again - rows).abs() <= step * rows.abs().amax(1, keepdim=True)).all()
    assert (again[3] == 0).all()
    torch.testing.assert_close(again.abs().amax(1), rows.abs().amax(1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_number_spoils_its_row_and_no_other(bad: float) -> None:
    weight = torch.randn(16, 32)
    values, scales = plain_quantize_rows(INT8, weight)
    states = torch.randn(3, 32)
    states[1, 5] = bad
    out = product(INT8, states, values, scales, None)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_integer_product_is_that_of_the_dequantised_factors(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    values, scales = plain_quantize_rows(INT8, torch.randn(24, 48))
    states = torch.randn(2, rows, 48).to(dtype)
    bias = torch.randn(24).to(dtype)
    left, left_scales = plain_quantize_rows(INT8, states.view(-1, 48))
    expected = (left.float() * left_scales[:, None]) @ (values.float() * scales[:, None]).t() + bias.float()
    out = product(INT8, states, values, scales, bias)
    assert out.dtype == dtype and out.shape == (2, rows, 24)
    torch.testing.assert_close(
        out.view(-1, 24), expected.to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-4
    )
    alone = product(INT8, states[:1, :1], values, scales, bias)
    assert torch.equal(alone, out[:1, :1])  # other rows of the batch change nothing


def test_unknown_formats_and_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fp-8.*must be fp8 or int8.*Did you mean"):
        format_for("fp-8", CPU)
    with pytest.raises(ValueError, match=r"compute capability 8.9.*on cpu"):
        NativeEngine(tiny.make(), quantization="fp8")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "lora", "qwen3_moe", "phi3_window"])
def test_log_probs_are_near_those_of_full_precision(kind: str) -> None:
    model = tiny.with_lora() if kind == "lora" else tiny.make(kind)
    engine = NativeEngine(model, quantization="int8")
    for prompt in PROMPTS[:2]:
        (group,) = engine.generate([Request(prompt, n=2, seed=1)], Sampling(max_tokens=12))
        for completion in group:
            plain = tiny.plain_log_probs(model, prompt, completion.ids)
            expected = plain.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
            gap = (torch.tensor(completion.log_probs) - expected).abs()
            assert gap.max() > 0 and gap.mean() < 0.1
    assert not any("forward" in part.__dict__ for part in model.modules())


def test_what_is_quantised(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.with_lora()
    copies = QuantizedLayers(model, "int8")
    with caplog.at_level(logging.INFO):
        copies.apply([])
    changed = {path for path, part in model.named_modules() if "forward" in part.__dict__}
    assert any(path.endswith("base_layer") for path in changed)
    assert not any("lm_head" in path or "lora_A" in path or "norm" in path for path in changed)
    assert "% of the weights" in caplog.text
    copies.undo()
    assert not any("forward" in part.__dict__ for part in model.modules())

    experts = tiny.make("qwen3_moe")
    others = QuantizedLayers(experts, "int8")
    others.apply([])
    changed = {path for path, part in experts.named_modules() if "forward" in part.__dict__}
    assert changed and not any(path.endswith(".gate") for path in changed)


@pytest.mark.parametrize(("family", "router"), [("hunyuan_v1_moe", "gate.wg"), ("jetmoe", "router.layer")])
def test_routers_with_a_linear_layer_inside_are_not_quantised(family: str, router: str) -> None:
    experts = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_topk": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZE, **experts))
    assert any(path.endswith(router) and isinstance(part, nn.Linear) for path, part in model.named_modules())
    QuantizedLayers(model, "int8").apply([])
    changed = {path for path, part in model.named_modules() if "forward" in part.__dict__}
    assert changed and not any(path.endswith(router) for path in changed)


@pytest.mark.parametrize("told", [True, False])
def test_weights_that_change_are_quantised_again_at_the_same_address(told: bool) -> None:
    model = tiny.make()
    engine = NativeEngine(model, quantization="int8")
    before = log_probs(engine, PROMPTS[1])
    weight = engine.borrowed_model.quantized._weights[0]
    address = weight._values.data_ptr()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    if told:
        engine.update_weights([], version=1)
    after = log_probs(engine, PROMPTS[1])
    fresh = log_probs(NativeEngine(model, quantization="int8"), PROMPTS[1])
    assert not torch.equal(before, after) and torch.equal(after, fresh)
    assert weight._values.data_ptr() == address


def test_new_weights_during_a_rollout_are_used_at_the_next_step() -> None:
    model = tiny.make()
    engine = NativeEngine(model, quantization="int8")
    new = {name: value + 0.1 * torch.randn_like(value) for name, value in model.named_parameters()}
    listen = _once(lambda: engine.update_weights(new.items(), version=1))
    request = Request(PROMPTS[1], on_tokens=lambda *_: listen())
    (group,) = engine.generate([request], Sampling(temperature=0, max_tokens=12))
    assert len(group[0].versions) == 2
    rest = [*PROMPTS[1], *group[0].ids[:-1]]
    fresh = NativeEngine(model, quantization="int8")
    (last,) = fresh.generate([Request(rest)], Sampling(temperature=0, max_tokens=1))
    assert last[0].ids == group[0].ids[-1:]
    assert last[0].log_probs[0] == pytest.approx(group[0].log_probs[-1], abs=1e-5)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    waiting = [call]

    def run() -> None:
        if waiting:
            waiting.pop()()

    return run


def test_training_between_rollouts_sees_the_weights_as_they_are() -> None:
    model = tiny.make()
    engine = NativeEngine(model, quantization="int8")
    ids = torch.tensor([PROMPTS[1]])
    before = model(input_ids=ids).logits
    log_probs(engine, PROMPTS[1])
    assert torch.equal(model(input_ids=ids).logits, before)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_sleep_frees_the_copies_and_they_come_back() -> None:
    engine = NativeEngine(tiny.make(), quantization="int8")
    copies = engine.borrowed_model.quantized
    before = log_probs(engine, PROMPTS[1])
    assert copies.num_bytes > 0 and copies.missing_bytes == 0
    engine.sleep()
    assert copies.missing_bytes == copies.num_bytes
    engine.wake()
    assert torch.equal(log_probs(engine, PROMPTS[1]), before)


def test_a_fused_projection_multiplies_with_the_copy() -> None:
    model: Any = tiny.make("qwen2")
    projection = next(iter(fused_forwards(model))).product
    projection.lay_out()
    hidden = torch.randn(3, projection.layers[0].in_features)
    plain = torch.cat(list(projection(hidden)), -1)
    copies = QuantizedLayers(model, "int8")
    copies.apply([projection])
    quantised = torch.cat(list(projection(hidden)), -1)
    assert 0 < (quantised - plain).abs().max() < 0.05 * plain.abs().max()
    copies.undo()
    assert torch.equal(torch.cat(list(projection(hidden)), -1), plain)
