"""The precision that a device computes in."""

from __future__ import annotations

import torch

from strop.models import build


def test_a_slow_precision_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    build._tell_fp32.cache_clear()
    assert [build.compute_dtype("bfloat16", torch.device("cpu")) for _ in range(3)] == [torch.float32] * 3
    assert caplog.text.count("no bf16 instructions") == 1
