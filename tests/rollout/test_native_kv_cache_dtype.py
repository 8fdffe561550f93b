"""A KV cache of 8 bits: what is stored, that every kind of pass reads it, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine, runner, step_loop
from strop.rollout.native.kv_cache import CacheTensors, KVCache
from strop.rollout.native.pages import PagedKVCache
from strop.rollout.native.quantization import cache as quantized
from strop.rollout.native.quantization.cache import ShortTensors, from_8_bits, in_8_bits, is_fp8
from tests.rollout import tiny
from tests.rollout.test_native import PROMPTS, ids

REQUESTS = [Request(p, n=2, seed=i, max_tokens=6 + 4 * i) for i, p in enumerate(PROMPTS)]
CPU = torch.device("cpu")


def per_token(engine: NativeEngine) -> int:
    assert engine._step_loop is not None
    return engine._step_loop.runner.cache.bytes_per_token


def wide_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of full precision that holds the numbers of an 8-bit one: the reference."""

    def write(
        self: CacheTensors, layer: int, slots: tuple[Tensor, Tensor], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        rounded = [from_8_bits(*in_8_bits(x), x.dtype) for x in (key, value)]
        place = (slots[0], slice(None), slots[1])
        self.keys[layer][place], self.values[layer][place] = rounded
        return rounded[0], rounded[1]

    monkeypatch.setattr(CacheTensors, "write", write)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stored_numbers_are_near_and_exact_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(50, 3, 32) * torch.logspace(-3, 3, 50)[:, None, None]).to(dtype)
    x[7] = 0
    short, exponents = in_8_bits(x)
    assert short.dtype == exponents.dtype == torch.uint8 and exponents.shape == (50, 3, 1)
    again = from_8_bits(short, exponents, dtype)
    assert torch.equal(again.float(), from_8_bits(short, exponents, torch.float32))
    largest = x.float().abs().amax(-1, keepdim=True)
    assert ((again.float() - x.float()).abs() <= largest / 16).all() and (again[7] == 0).all()
    assert torch.equal(from_8_bits(*in_8_bits(again), dtype), again)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = torch.randn(2, 8)
    x[1, 3] = bad
    again = from_8_bits(*in_8_bits(x), torch.float32)
    assert again[1, 3].isnan() and again[0].isfinite().all()


@pytest.mark.parametrize(
    "kind, limits",
    [
        ("llama", {}),
        ("gpt_oss_sinks", {}),
        ("gemma2_softcap", {"max_num_batched_tokens": 8, "max_num_seqs": 3}),
    ],
)
def test_answers_are_those_of_a_wide_cache_with_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, kind: str, limits: dict[str, int]
) -> None:
    model = tiny.make(kind)
    found = NativeEngine(model, kv_cache_dtype="fp8", **limits).generate(REQUESTS, Sampling())  # type: ignore[arg-type]
    wide_cache(monkeypatch)
    expected = NativeEngine(model, **limits).generate(REQUESTS, Sampling())  # type: ignore[arg-type]
    assert ids(found) == ids(expected)
    for group, wanted in zip(found, expected):
        for one, other in zip(group, wanted):
            gap = torch.tensor(one.log_probs) - torch.tensor(other.log_probs)
            assert gap.abs().max() < 1e-5


def test_answers_in_pieces_with_guesses_or_computed_again_are_the_same() -> None:
    model = tiny.make()
    expected = ids(NativeEngine(model, kv_cache_dtype="fp8").generate(REQUESTS, Sampling()))
    ways: list[dict[str, Any]] = [
        {"cache_bytes": 80 * 72},
        {"speculation": SpeculationConfig(enable=True, num_tokens=3)},
        {"max_num_batched_tokens": 5},
    ]
    for way in ways:
        engine = NativeEngine(model, kv_cache_dtype="fp8", **way)
        assert ids(engine.generate(REQUESTS, Sampling())) == expected
    engine = NativeEngine(model, kv_cache_dtype="fp8")
    states = [engine.submit(request, Sampling()) for request in REQUESTS]
    with engine.borrowed_model():
        while not engine.idle:
            engine.step()
            engine.update_weights((), 1)  # all rows are preempted and computed again
    assert ids([state.result() for state in states]) == expected
    assert engine.stats()["recomputed_tokens"] > 100


def test_the_difference_to_training_is_small_and_there() -> None:
    model = tiny.make()
    gaps = []
    for dtype in ("auto", "fp8"):
        (group,) = NativeEngine(model, kv_cache_dtype=dtype).generate(
            [Request(PROMPTS[1], n=8, seed=1)], Sampling(max_tokens=20)
        )
        total = 0.0
        for one in group:
            plain = tiny.plain_log_probs(model, PROMPTS[1], one.ids)
            expected = plain.gather(1, torch.tensor(one.ids)[:, None])[:, 0]
            total += float((torch.tensor(one.log_probs) - expected).abs().mean()) / len(group)
        gaps.append(total)
    assert gaps[0] < 1e-5 and 1e-4 < gaps[1] < 0.3  # wide initial weights


def test_a_token_costs_half_the_bytes_and_twice_the_rows_fit() -> None:
    layers = {0: (8, 128, 128), 1: (8, 128, 128)}
    for kind in (KVCache, PagedKVCache):
        wide, short = (
            kind(layers, dtype=torch.bfloat16, device=CPU, tensors=tensors)
            for tensors in (CacheTensors, ShortTensors)
        )
        assert wide.bytes_per_token == 2 * 2 * 8 * 256
        assert short.bytes_per_token == 2 * 8 * 258
    paged = PagedKVCache(layers, dtype=torch.bfloat16, device=CPU, tensors=ShortTensors)
    paged.resize_pool(4)
    assert sum(tensor.nbytes for tensor in paged.tensors.all) == paged.bytes
    tensors = paged.tensors
    assert isinstance(tensors, ShortTensors)
    tensors.keys[0][1] = 7
    tensors.key_exponents[0][1] = 130
    paged._copy([1], [3])
    assert (tensors.keys[0][3] == 7).all() and (tensors.key_exponents[0][3] == 130).all()

    model = tiny.make()
    rows = []
    for dtype in ("auto", "fp8"):
        engine = NativeEngine(model, kv_cache_dtype=dtype, cache_bytes=64 * 256)
        engine.generate([Request([1, 2, 3], n=16, seed=0)], Sampling(max_tokens=8))
        rows.append((per_token(engine), engine.stats()["rows_in_flight"]))
    assert rows[1][0] < 0.3 * rows[0][0]  # float32 against 8 bits
    assert rows[1][1] > 1.5 * rows[0][1]


def test_devices_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_fp8("fp8", CPU) and not is_fp8("auto", CPU)
    with pytest.raises(ValueError, match=r"fp-8.*auto or fp8.*Did you mean"):
        NativeEngine(tiny.make(), kv_cache_dtype="fp-8")
    with pytest.raises(ValueError, match=r"on mps.*kv_cache_dtype=auto"):
        is_fp8("fp8", torch.device("mps"))
    monkeypatch.setattr(quantized.torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(quantized.torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match=r"compute capability 8.9.*A100 has 8.0.*kv_cache_dtype=auto"):
        is_fp8("fp8", torch.device("cuda"))


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_one_group_exhausts_the_pages_and_one_request_is_longer_than_all(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The long one fails alone with a reason; rows of the group are preempted and computed again, and get the
    tokens that they get in a large cache."""
    monkeypatch.setattr(runner, "uses_pages", lambda device: True)
    monkeypatch.setattr(step_loop, "HEADROOM", 8)
    model = tiny.make()
    group = Request([5, 9, 2], n=6, seed=1, max_tokens=90)
    other = Request([7, 1, 4], seed=2, max_tokens=20)
    too_long = Request(list(range(1, 60)), max_tokens=69)  # 128 tokens; two pages are for all rows
    expected = NativeEngine(model, kv_cache_dtype=dtype).generate([group, other], Sampling())
    per_token = 72 if dtype == "fp8" else 256
    engine = NativeEngine(model, kv_cache_dtype=dtype, cache_bytes=7 * 64 * per_token)
    found = engine.generate([group, other], Sampling())
    assert ids(found) == ids(expected)
    numbers = engine.stats()
    assert numbers["preemptions"] > 0 and numbers["recomputed_tokens"] > 0
    small = NativeEngine(model, kv_cache_dtype=dtype, cache_bytes=3 * 64 * per_token)
    long, short = small.generate([too_long, Request([7, 1, 4], seed=2, max_tokens=20)], Sampling())
    assert long[0].finish == "error" and "the cache holds 64" in (long[0].error or "")
    assert short[0].ids == expected[1][0].ids
