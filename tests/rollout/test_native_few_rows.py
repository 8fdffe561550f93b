"""Compiled products of few rows: the numbers of torch, for every size, thread count and adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from strop.cpu import compiler
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.cpu import few_rows
from strop.rollout.native.cpu import packed_linear as packed
from strop.rollout.native.cpu.few_rows import Adapter, PackedWeight, packed_weight
from tests.rollout import tiny
from tests.rollout.test_native import PROMPTS

SOURCE = Path(few_rows.__file__).with_suffix(".c")


@pytest.fixture
def weight() -> torch.Tensor:
    if packed_weight(torch.zeros(1, 1)) is None:
        pytest.skip("no compiler, or a CPU without AVX-512 and NEON")
    torch.manual_seed(0)
    return torch.randn(75, 301) / 301**0.5


@pytest.mark.parametrize("rows", [1, 4, 5, 8, 16, 23, 64, few_rows.MOST_ROWS])
@pytest.mark.parametrize("rank", [0, 1, 6, 32])
def test_products_equal_those_of_float64(weight: torch.Tensor, rows: int, rank: int) -> None:
    x = torch.randn(rows, 301)
    bias = torch.randn(75)
    expected = F.linear(x.double(), weight.double(), bias.double())
    adapter = None
    if rank:
        adapter = Adapter(torch.randn(rank, 301) / 301**0.5, torch.randn(75, rank) / rank**0.5, 0.7)
        expected += 0.7 * (x.double() @ adapter.a.double().t()) @ adapter.b.double().t()
    copy = packed_weight(weight)
    assert copy is not None and (copy.takes(x, rank) or rows == 1)
    torch.testing.assert_close(copy(x[None], bias, adapter)[0].double(), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(copy(x, None), copy(x, torch.zeros(75)), rtol=0, atol=0)


def test_a_row_has_the_same_bits_with_any_other_rows_and_threads(weight: torch.Tensor) -> None:
    copy = packed_weight(weight)
    assert copy is not None
    x = torch.randn(40, 301)
    adapter = Adapter(torch.randn(6, 301), torch.randn(75, 6), 0.5)
    whole = copy(x, None, adapter)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(copy(x, None, adapter), whole)
    finally:
        torch.set_num_threads(before)
    for rows in (1, 7, 12):
        assert torch.equal(copy(x[-rows:], None, adapter), whole[-rows:])


def test_more_rows_than_it_takes_are_computed_by_torch(weight: torch.Tensor) -> None:
    copy = packed_weight(weight)
    assert copy is not None
    layer = nn.Linear(301, 75, bias=False)
    layer.weight = nn.Parameter(weight)
    x = torch.randn(few_rows.MOST_ROWS + 1, 301)
    assert not copy.takes(x)
    assert torch.equal(packed.CompiledLinear(layer, copy)(x), F.linear(x, weight))


@pytest.mark.parametrize("compiled", [True, False])
def test_sampled_log_probs_under_lora_are_recomputed_ones(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, weight: torch.Tensor
) -> None:
    """With the compiled products of layers and adapters, and without a compiler."""
    called: list[int] = []
    multiply = PackedWeight.__call__

    def counted(self: PackedWeight, *args: object) -> torch.Tensor:
        called.append(len(args))
        return multiply(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedWeight, "__call__", counted)
    monkeypatch.setattr(packed, "_SMALLEST", 1)
    monkeypatch.setattr(packed, "_faster", lambda dtype: dtype == torch.float32)
    if not compiled:
        monkeypatch.setattr(packed, "packed_weight", lambda weight: None)
    model = tiny.with_lora()
    engine = NativeEngine(model)
    for version in (1, 2):
        greedy = Sampling(temperature=0, max_tokens=12)
        for prompt, group in zip(PROMPTS, engine.generate([Request(p, n=2) for p in PROMPTS], greedy)):
            tiny.assert_log_probs(model, prompt, group[0].ids, group[0].log_probs)
        assert not any("forward" in layer.__dict__ for layer in model.modules())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.update_weights([], version=version)
    assert (3 in called) == compiled, "products with an adapter"


def test_another_default_precision_changes_nothing(weight: torch.Tensor) -> None:
    few_rows._functions.cache_clear()
    x = torch.randn(3, 301)
    torch.set_default_dtype(torch.bfloat16)
    try:
        copy = packed_weight(weight)
        assert copy is not None
        torch.testing.assert_close(copy(x, None), F.linear(x, weight), rtol=0, atol=3e-6)
    finally:
        torch.set_default_dtype(torch.float32)


def test_without_a_compiler_nothing_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weight: torch.Tensor
) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    compiler.load_library.cache_clear()
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert compiler.load_library(SOURCE) is None
    compiler.load_library.cache_clear()


def test_a_compiler_that_fails_is_reported_and_torch_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, weight: torch.Tensor
) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "gcc")
    broken = tmp_path / "broken.c"
    broken.write_text("this is not C")
    assert compiler.load_library(broken) is None
    assert "broken.c is not used" in caplog.text
    assert not list((tmp_path / "kernels").iterdir())


@pytest.mark.parametrize("rows", [1, 5, 8, 16, 64])
@pytest.mark.parametrize("rank", [0, 6])
def test_weights_that_are_exact_in_bf16_are_kept_in_16_bits_with_the_same_bits(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, rows: int, rank: int
) -> None:
    short = weight.bfloat16().float()
    x = torch.randn(rows, 301)
    bias = torch.randn(75)
    adapter = Adapter(torch.randn(rank, 301), torch.randn(75, rank), 0.5) if rank else None
    narrow = packed_weight(short)
    monkeypatch.setattr(few_rows, "_is_bf16", lambda weight: False)
    wide = packed_weight(short)
    assert narrow is not None and wide is not None
    assert torch.equal(narrow(x, bias, adapter), wide(x, bias, adapter))
    assert 2 * narrow.num_bytes == wide.num_bytes


@pytest.mark.parametrize("place", [0, 1023, 1024, 75 * 301 - 1])
def test_one_weight_with_more_bits_keeps_all_in_32(weight: torch.Tensor, place: int) -> None:
    mixed = weight.bfloat16().float()
    mixed.view(-1)[place] = 1 + 2**-20
    copy = packed_weight(mixed)
    assert copy is not None
    x = torch.eye(301)[:8]
    assert torch.equal(copy(x, None), mixed[:, :8].t())
    assert copy.num_bytes == 4 * 96 * 301 or copy.num_bytes == 4 * 84 * 301  # panels of 32 or 12
