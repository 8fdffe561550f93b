"""Quantised weights of the native engine on a CUDA device: kernels, products, and recorded steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strop.models.patches import MODEL_PATCHES, PatchContext, apply_patches
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.quantization import layers
from strop.rollout.native.quantization.formats import (
    FORMATS,
    Format,
    add_product,
    kernels_for,
    plain_quantize_rows,
    product,
    quantize_rows,
)
from tests.rollout import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMS = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
PROMPTS = [[5, 9, 2], [7, 1, 1, 4, 30, 12, 8, 77, 3, 2, 6], [11], [3, 4, 5, 6, 7, 8]]


def model_on_device(kind: str) -> Any:
    """bf16 with sizes that every format takes, and logits that differ enough."""
    model = tiny.make(kind, wide=True)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(0.3)
    return model.cuda().bfloat16()


def quantised(form: Format, rows: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(rows.shape, dtype=form.dtype, device="cuda")
    scales = torch.empty(len(rows), device="cuda")
    quantize_rows(form, rows, values, scales)
    return values, scales


def gaps(engine: NativeEngine, model: Any, max_tokens: int = 24) -> Tensor:
    """How far the engine's log-probs are from those of a plain forward pass in float32, per sampled token."""
    plain = _as_plain(model)
    answers = engine.generate(
        [Request(prompt, n=3, seed=i) for i, prompt in enumerate(PROMPTS)], Sampling(max_tokens=max_tokens)
    )
    found = []
    for prompt, group in zip(PROMPTS, answers):
        for completion in group:
            assert completion.finish == "length"
            log_probs = tiny.plain_log_probs(plain, prompt, completion.ids)
            expected = log_probs.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
            found.append((torch.tensor(completion.log_probs) - expected).abs())
    return torch.cat(found)


def _as_plain(model: Any) -> Any:
    plain = type(model)(model.config).eval()
    plain.load_state_dict({name: value.float().cpu() for name, value in model.state_dict().items()})
    return plain


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("size", [48, 4096, 12288])
def test_the_kernel_quantises_as_plain_torch(form: Format, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    wide = (
        torch.randn(9, 2 * size, device="cuda").to(dtype) * torch.logspace(-3, 3, 9, device="cuda")[:, None]
    )
    rows = wide.to(dtype)[:, :size]  # rows of a wider tensor
    rows[4] = 0
    values, scales = quantised(form, rows)
    plain_values, plain_scales = plain_quantize_rows(form, rows)
    assert torch.equal(scales, plain_scales)
    assert torch.equal(values.float(), plain_values.float())


@FORMS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_spoils_its_row_and_no_other(form: Format, bad: float) -> None:
    states = torch.randn(3, 64, device="cuda").bfloat16()
    states[1, 5] = bad
    values, scales = quantised(form, torch.randn(32, 64, device="cuda").bfloat16())
    out = product(form, states, values, scales, None)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@FORMS
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 100, 256])
def test_products_are_those_of_the_dequantised_factors(form: Format, rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(384, 512, device="cuda").bfloat16()
    states = torch.randn(rows, 512, device="cuda").bfloat16()
    added = torch.randn(384, device="cuda").bfloat16() if bias else None
    values, scales = quantised(form, weight)
    left, left_scales = plain_quantize_rows(form, states)
    expected = (left.double() * left_scales.double()[:, None]) @ (
        values.double() * scales.double()[:, None]
    ).t()
    if added is not None:
        expected += added
    out = product(form, states, values, scales, added)
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).abs().max() < 0.01 * expected.abs().max()
    alone = product(form, states[:1], values, scales, added)
    assert (alone.float() - out[:1].float()).abs().max() < 0.01 * expected.abs().max()


@FORMS
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("stream_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("outputs, inputs", [(4096, 12288), (1536, 8960), (384, 512)])
def test_products_are_added_to_the_stream(
    form: Format, outputs: int, inputs: int, stream_dtype: torch.dtype, in_place: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs, device="cuda").bfloat16()
    values, scales = quantised(form, weight)
    right = values.double() * scales.double()[:, None]
    for rows, bias in (
        (1, False),
        (7, True),
        (64, False),
        (65, True),
        (200, False),
        (256, True),
        (300, False),
    ):
        states = torch.randn(1, rows, inputs, device="cuda").bfloat16()
        stream = torch.randn(1, rows, outputs, device="cuda", dtype=stream_dtype) * inputs**0.5
        added = torch.randn(outputs, device="cuda").bfloat16() if bias else None
        left, left_scales = plain_quantize_rows(form, states[0])
        expected = stream.double() + (left.double() * left_scales.double()[:, None]) @ right.t()
        if added is not None:
            expected += added
        found = add_product(form, stream, states, values, scales, added, in_place=in_place)
        assert found.dtype == stream_dtype and (found.data_ptr() == stream.data_ptr()) == in_place
        assert (found.double() - expected).abs().max() < 0.01 * expected.abs().max(), rows


@FORMS
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_log_probs_are_near_those_of_full_precision(kind: str, eager: bool, form: Format) -> None:
    model = model_on_device(kind)
    engine = NativeEngine(model, enforce_eager=eager, quantization=form.name)
    gap = gaps(engine, model)
    assert 0 < gap.mean() < 0.15 and gap.max() < 1.5
    fused = {projection.multiply for projection in engine.borrowed_model._patches.fused}
    assert fused == {None}  # the rollout is over
    assert engine.borrowed_model.quantized.num_bytes > 0


@FORMS
@pytest.mark.parametrize("fp32_residual", [False, True], ids=["bf16 stream", "fp32 stream"])
def test_norms_and_gates_quantise_for_the_products_after_them(
    monkeypatch: pytest.MonkeyPatch, form: Format, fp32_residual: bool
) -> None:
    """The samples are those of an engine whose products quantise for themselves."""
    model = model_on_device("qwen3")
    apply_patches(model, MODEL_PATCHES, PatchContext(fp32_residual=fp32_residual))
    requests = [Request(prompt, n=3, seed=i) for i, prompt in enumerate(PROMPTS)]
    kernels: Any = kernels_for("cuda")
    plain = kernels.quantize_rows
    calls: list[int] = []

    def counted(rows: Tensor, *more: Any) -> None:
        calls.append(len(rows))
        plain(rows, *more)

    monkeypatch.setattr(kernels, "quantize_rows", counted)
    found = []
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(layers, "producers", lambda *_: iter(()))
        calls.clear()
        engine = NativeEngine(model, enforce_eager=True, quantization=form.name)
        answers = engine.generate(requests, Sampling(max_tokens=24))
        found.append([(c.ids, c.log_probs) for group in answers for c in group])
        steps = [rows for rows in calls if rows == 12]  # decode steps
        # Without it: before q/k/v, o, gate/up and down of each layer. With it: before o.
        assert len(steps) == 23 * model.config.num_hidden_layers * (4 if alone else 1)
    assert found[0] == found[1]


@FORMS
@pytest.mark.parametrize("told", [True, False])
def test_recorded_steps_read_weights_that_were_quantised_again(form: Format, told: bool) -> None:
    model = model_on_device("llama")
    engine = NativeEngine(model, quantization=form.name)
    assert gaps(engine, model).mean() < 0.15
    assert engine._step_loop is not None
    runner = engine._step_loop.runner
    count = runner.num_recorded
    assert count > 0
    before = _as_plain(model)
    new = {name: value + 0.1 * torch.randn_like(value) for name, value in model.named_parameters()}
    if told:
        engine.update_weights(new.items(), version=1)
    else:
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(new[name])
    found = gaps(engine, model)
    assert runner.num_recorded == count
    assert found.mean() < gaps(engine, before).mean()
    fresh = NativeEngine(model, quantization=form.name)
    assert torch.equal(found, gaps(fresh, model))


@FORMS
def test_copies_that_were_freed_come_back(form: Format) -> None:
    model = model_on_device("qwen2")
    engine = NativeEngine(model, quantization=form.name)
    gaps(engine, model)
    engine.sleep()
    engine.release_memory()
    copies = engine.borrowed_model.quantized
    assert copies.missing_bytes == copies.num_bytes > 0
    engine.wake()
    assert gaps(engine, model).mean() < 0.15
