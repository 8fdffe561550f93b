"""Kernels of the gated delta rule in the engine: used after a self-check, and never dropped in silence."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.models import patches, self_check
from strop.models.layouts import delta_rule
from strop.models.patches import choose_patches, sampling_patches
from strop.rollout.base import Request, Sampling
from strop.rollout.native.engine import NativeEngine
from tests.models.hybrids import hybrid

SAMPLING = Sampling(max_tokens=5, ignore_eos=True)
PROMPT = [7, 4, 4, 30, 12, 8, 57]


def convolve_step(x: Tensor, weight: Tensor, state: Tensor, running: Tensor | None = None) -> Tensor:
    state.copy_(torch.cat((state[..., 1:], x[..., None]), -1))
    return F.silu((state * weight).sum(-1))


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return weight * x * scale * F.silu(gate.view_as(x))


def delta_kernels(error: float) -> Any:
    """The kernels as plain torch, with a relative error of the state."""

    def delta_step(
        mixed: Tensor,
        a: Tensor,
        b: Tensor,
        log_decay: Tensor,
        bias: Tensor,
        state: Tensor,
        running: Tensor | None = None,
    ) -> Tensor:
        rows, heads, key_size, value_size = state.shape
        key_width = (mixed.shape[1] - heads * value_size) // 2
        query, key, value = mixed.split([key_width, key_width, heads * value_size], 1)
        group = heads // (key_width // key_size)
        query = F.normalize(query.view(rows, -1, key_size), dim=-1).repeat_interleave(group, 1)
        key = F.normalize(key.view(rows, -1, key_size), dim=-1).repeat_interleave(group, 1)
        decay = (-log_decay.exp() * F.softplus(a + bias)).exp()
        state.mul_(decay[..., None, None] * (1 + error))
        seen = (state * key[..., None]).sum(2)
        change = (value.view(rows, heads, value_size) - seen) * b.sigmoid()[..., None]
        state.add_(key[..., None] * change[:, :, None])
        return (state * query[..., None]).sum(2) * key_size**-0.5

    return SimpleNamespace(convolve_step=convolve_step, delta_step=delta_step, gated_norm=gated_norm)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "_checked", {})
    monkeypatch.setattr(self_check, "refused", {})
    monkeypatch.setattr(patches, "refused", self_check.refused)
    patches._log_once.cache_clear()


def sampled(family: str, error: float, monkeypatch: pytest.MonkeyPatch, chosen: str = "auto") -> Any:
    monkeypatch.setattr(delta_rule, "delta_kernels", lambda device: delta_kernels(error))
    model = hybrid(family)
    choose_patches(model, chosen)
    answers = NativeEngine(model).generate([Request(PROMPT, n=2, seed=3)], SAMPLING)[0]
    return model, answers


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_kernels_with_other_numbers_are_off_with_one_warning(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "strop"):
        model, answers = sampled(family, 1e-3, monkeypatch)
        NativeEngine(model).generate([Request(PROMPT)], SAMPLING)
    own = [record for record in caplog.records if record.name.startswith("strop")]
    warned = [record.getMessage() for record in own if record.levelno >= logging.WARNING]
    assert len(warned) == 1 and "Kernel delta_rule is off" in warned[0]
    assert "its numbers differ by up to" in warned[0] and "units in the last place" in warned[0]
    assert "delta_rule" not in sampling_patches(model)
    listed = [record.getMessage() for record in caplog.records if "while it samples" in record.getMessage()]
    assert len(listed) == 1 and "delta_rule (off: its numbers differ" in listed[0]
    monkeypatch.setattr(delta_rule, "delta_kernels", lambda device: None)
    plain = NativeEngine(hybrid(family)).generate([Request(PROMPT, n=2, seed=3)], SAMPLING)[0]
    assert [one.log_probs for one in answers] == [one.log_probs for one in plain], "the kernels took no part"


def test_kernels_with_the_same_numbers_are_listed_and_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "strop"):
        model, answers = sampled("qwen3_5_text", 0.0, monkeypatch)
    assert sampling_patches(model)[-1] == "delta_rule"
    assert "while it samples: rollout_attention, eval_mode, delta_rule" in caplog.text
    off, plain = sampled("qwen3_5_text", 0.0, monkeypatch, chosen="off")
    assert sampling_patches(off) == ["rollout_attention", "eval_mode"]
    for one, other in zip(answers, plain, strict=True):
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-5, rtol=0)
