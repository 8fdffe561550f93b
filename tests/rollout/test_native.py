"""What only the native engine has: sharing, queues, a cache with a budget."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import RwkvConfig, RwkvForCausalLM

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native import NativeEngine, attention
from tests.rollout import tiny

PROMPTS = [[5, 9, 2], [7, 1, 1, 4, 30, 12, 8, 77, 3, 2, 6], [11], list(range(1, 60)), [3, 4, 5, 6, 7, 8]]
PER_TOKEN = 2 * 2 * 16 * 4  # layers, keys and values, 2 heads of 8, bytes


def ids(answers: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.ids for c in group] for group in answers]


def count_tokens(model: Any) -> list[int]:
    """Tokens of each forward pass from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return seen


def test_a_prompt_is_computed_once_for_all_its_samples() -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    engine.generate([Request([1])], Sampling(max_tokens=1))
    seen = count_tokens(model)
    engine.generate([Request(PROMPTS[1], n=8), Request(PROMPTS[0], n=4)], Sampling(max_tokens=3))
    assert seen == [14, 12, 12]


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7, "enable_chunked_prefill": False},
        {"cache_bytes": 80 * PER_TOKEN},
        {"cache_bytes": 200 * PER_TOKEN, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["llama", "mistral_window", "gemma2_softcap"])
def test_limits_change_the_order_of_work_and_nothing_else(kind: str, limits: dict[str, Any]) -> None:
    model = tiny.make(kind)
    requests = [Request(p, n=1 + i % 3, seed=i, max_tokens=5 + 3 * i) for i, p in enumerate(PROMPTS)]
    sampling = Sampling(temperature=0.8, top_p=0.9)
    free = NativeEngine(model).generate(requests, sampling)
    if "cache_bytes" in limits and kind != "llama":
        limits = {**limits, "cache_bytes": limits["cache_bytes"] * (2 if kind == "gemma2_softcap" else 1)}
    tight = NativeEngine(model, **limits).generate(requests, sampling)
    assert ids(tight) == ids(free)
    for a, b in zip([c for g in free for c in g], [c for g in tight for c in g]):
        assert torch.allclose(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4)


def test_a_full_cache_sends_rows_back_and_loses_nothing() -> None:
    model = tiny.make()
    engine = NativeEngine(model, cache_bytes=260 * PER_TOKEN)
    requests = [Request([3 + i], n=1, seed=i) for i in range(4)]
    sampling = Sampling(max_tokens=100)
    answers = engine.generate(requests, sampling)
    assert engine.stats()["preemptions"] > 0
    assert ids(answers) == ids(NativeEngine(model).generate(requests, sampling))
    assert engine._step_loop is not None and engine._step_loop.runner.cache.bytes <= 260 * PER_TOKEN


def test_a_request_that_never_fits_fails_alone() -> None:
    engine = NativeEngine(tiny.make(), cache_bytes=50 * PER_TOKEN)
    long, short = engine.generate([Request([1] * 40), Request([2], max_tokens=5)], Sampling(max_tokens=60))
    assert long[0].finish == "error" and "the cache holds 50" in (long[0].error or "")
    assert len(short[0].ids) == 5


@pytest.mark.parametrize("top_p", [1e-50, 1e-320])
def test_a_top_p_below_float32_takes_the_likeliest_token(top_p: float) -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    found = engine.generate([Request(PROMPTS[0], n=2)], Sampling(top_p=top_p, max_tokens=6))
    assert ids(found) == [[tiny.plain_greedy(model, PROMPTS[0], 6)] * 2]


def test_numbers_that_a_tensor_cannot_hold_disturb_no_other_request() -> None:
    engine = NativeEngine(tiny.make())
    plain, broken = Request(PROMPTS[0], seed=1, max_tokens=5), Request(PROMPTS[1], max_tokens=2.5)  # type: ignore[arg-type] # as a caller may

    async def both() -> list[list[Completion]]:
        every = Sampling(top_k=1 << 70)
        calls = (engine.agenerate(plain, every), engine.agenerate(broken, Sampling(top_k=5)))
        return list(await asyncio.gather(*calls))

    first, second = asyncio.run(both())
    assert ids([first]) == ids(engine.generate([plain], Sampling()))
    assert second[0].finish == "error" and "max_tokens=2.5" in str(second[0].error)


def test_rows_that_end_make_room_for_those_who_wait() -> None:
    model = tiny.make()
    engine = NativeEngine(model, max_num_seqs=4)
    engine.generate([Request([1])], Sampling(max_tokens=1))
    seen = count_tokens(model)
    engine.generate([Request([i], max_tokens=2 if i % 2 else 10) for i in range(12)], Sampling(temperature=0))
    assert sum(seen) == 6 * 2 + 6 * 10  # no row is computed that nobody asked for


def test_an_error_in_the_module_reaches_the_caller_and_the_engine_lives_on() -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    expected = engine.generate([Request(PROMPTS[0], n=2)], Sampling(temperature=0, max_tokens=6))
    calls = 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")

    handle = model.register_forward_pre_hook(hook)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([Request(PROMPTS[0], n=2)], Sampling(temperature=0, max_tokens=6))
    handle.remove()
    assert engine._step_loop is not None and engine._step_loop.runner.cache.bytes == 0
    assert model.config._attn_implementation == "sdpa"
    assert ids(engine.generate([Request(PROMPTS[0], n=2)], Sampling(temperature=0, max_tokens=6))) == ids(
        expected
    )


def test_coroutines_share_batches() -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    engine.generate([Request([1])], Sampling(max_tokens=1))
    seen = count_tokens(model)

    async def crowd() -> None:
        await asyncio.gather(*(engine.agenerate(Request([i]), Sampling(max_tokens=20)) for i in range(8)))

    asyncio.run(crowd())
    assert sum(seen) == 8 * 20
    assert len(seen) < 8 * 20 / 3


def test_coroutines_may_sample_each_in_its_own_way() -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    ways = [
        Sampling(temperature=0, max_tokens=9),
        Sampling(temperature=1.5, top_k=4, max_tokens=9),
        Sampling(top_p=0.5, max_tokens=9, stop_ids=(3, 4, 5)),
        Sampling(repetition_penalty=1.5, max_tokens=9),
    ]
    requests = [Request(PROMPTS[i], seed=i) for i in range(4)]
    alone = [engine.generate([r], s)[0][0].ids for r, s in zip(requests, ways)]

    async def crowd() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.agenerate(r, s) for r, s in zip(requests, ways)))

    assert [group[0].ids for group in asyncio.run(crowd())] == alone


def test_an_error_in_the_module_reaches_every_coroutine() -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    engine.generate([Request([1])], Sampling(max_tokens=1))

    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    handle = model.register_forward_pre_hook(fail)

    async def crowd() -> list[Any]:
        asks = (engine.agenerate(Request([i]), Sampling(max_tokens=4)) for i in range(3))
        return await asyncio.gather(*asks, return_exceptions=True)

    assert [str(error) for error in asyncio.run(crowd())] == ["device lost"] * 3
    handle.remove()
    assert len(asyncio.run(engine.agenerate(Request([1]), Sampling(max_tokens=4)))[0].ids) == 4


def test_sleep_frees_the_cache_and_refuses_while_requests_run() -> None:
    engine = NativeEngine(tiny.make())
    engine.generate([Request([1], n=3)], Sampling(max_tokens=4))
    assert engine._step_loop is not None and engine._step_loop.runner.cache.bytes > 0
    engine.sleep()
    cache = engine._step_loop.runner.cache
    assert cache.bytes == 0 and not cache.tensors.all
    engine.submit(Request([1]), Sampling(max_tokens=4))
    with pytest.raises(ValueError, match=r"call abort\(\) first"):
        engine.sleep()
    engine.abort()
    engine.step()
    engine.sleep()


def test_a_training_pass_during_a_rollout_is_refused() -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    with engine.borrowed_model(), pytest.raises(ValueError, match="run while the native engine samples"):
        model(input_ids=torch.tensor([[1, 2]]))
    assert model(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, tiny.VOCABULARY)


def test_a_model_without_attention_or_states_in_a_cache_is_refused_with_a_way_out() -> None:
    model = RwkvForCausalLM(RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2))
    with pytest.raises(ValueError, match=r"rollout\.name=hf"):
        NativeEngine(model).generate([Request([1])], Sampling(max_tokens=2))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_stays_bfloat16_in_the_cache() -> None:
    model = tiny.make().to(torch.bfloat16)
    engine = NativeEngine(model)
    answer = engine.generate([Request(PROMPTS[1], n=2)], Sampling(temperature=0, max_tokens=6))[0][0]
    assert engine._step_loop is not None and engine._step_loop.runner.cache.dtype == torch.bfloat16
    plain = tiny.plain_log_probs(model, PROMPTS[1], answer.ids).gather(1, torch.tensor(answer.ids)[:, None])[
        :, 0
    ]
    assert (torch.tensor(answer.log_probs) - plain).abs().mean() < 5e-2


def test_the_cache_keeps_its_size_when_batches_of_different_shapes_take_turns() -> None:
    engine = NativeEngine(tiny.make())
    wide = [Request([1, 2, 3], seed=i, max_tokens=2) for i in range(8)]
    deep = [Request(list(range(1, 60)), seed=9, max_tokens=30)]
    sizes = []
    for batch in (wide, deep, wide, deep):
        engine.generate(batch, Sampling())
        assert engine._step_loop is not None
        sizes.append((engine._step_loop.runner.cache.rows, engine._step_loop.runner.cache.capacity))
    assert sizes[0] == (8, 64) and sizes[1] == sizes[2] == sizes[3] == (8, 128)


def attended(q: Any, k: Any, v: Any, first: int, scale: float | None, window: int | None) -> Any:
    """Queries at positions `first` .. of the sequence with these keys and values [tokens, heads, D]."""
    queries, keys = torch.arange(first, first + len(q)), torch.arange(len(k))
    distance = queries[:, None] - keys
    mask = (distance >= 0) & (distance < (window or len(k)))
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("kind, used", [("llama", True), ("mistral_window", True), ("gemma2_softcap", False)])
def test_kernels_over_packed_prompts_change_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: str, used: bool
) -> None:
    """As on a GPU, with plain torch in the place of the kernels: one for whole prompts, one for pieces that go on."""
    model = tiny.make(kind)
    requests = [Request(p, n=2, seed=i) for i, p in enumerate([*PROMPTS, [3, 4, 5, 6, 7, 8] * 5])]
    sampling = Sampling(max_tokens=8)
    expected = NativeEngine(model).generate(requests, sampling)
    longer = [Request([*requests[i].ids, *expected[i][0].ids, 9, 9, 4], seed=5) for i in (3, 5)]
    further = NativeEngine(model, enable_prefix_caching=False).generate(
        [*longer, Request([8, 8, 1], seed=6)], sampling
    )
    whole: list[int] = []
    pieces: list[list[int]] = []

    def kernel(
        q: Any, k: Any, v: Any, bounds: Any, longest: int, *, scale: float | None, window: int | None
    ) -> Any:
        whole.append(len(q))
        assert longest == int(bounds.diff().max())
        return torch.cat(
            [attended(q[a:b], k[a:b], v[a:b], 0, scale, window) for a, b in pairwise(bounds.tolist())]
        )

    class Flash:
        @staticmethod
        def continued_attention(
            q: Any,
            keys: Any,
            values: Any,
            bounds: Any,
            longest: int,
            origins: Any,
            tables: Any,
            exponents: Any,
            *,
            scale: Any,
            window: Any,
        ) -> Any:
            assert exponents is None, "not a cache of 8 bits"
            pieces.append(origins.tolist())
            assert longest == int(bounds.diff().max())
            parts = []
            for (a, b), origin, pages in zip(pairwise(bounds.tolist()), origins.tolist(), tables):
                k, v = (
                    cache[pages].transpose(1, 2).flatten(0, 1)[: origin + b - a] for cache in (keys, values)
                )
                parts.append(attended(q[a:b], k, v, origin, scale, window))
            return torch.cat(parts)

    monkeypatch.setattr(attention, "DEVICES", ("cpu",))
    monkeypatch.setattr(attention, "varlen_kernel", lambda *_: kernel)
    monkeypatch.setattr(attention, "flash_kernels", lambda q, k, v: Flash)
    engine = NativeEngine(model)
    assert ids(engine.generate(requests, sampling)) == ids(expected)
    assert bool(whole) == used and not pieces
    del whole[:]
    assert ids(engine.generate([*longer, Request([8, 8, 1], seed=6)], sampling)) == ids(further)
    assert not whole and bool(pieces) == used
    assert not used or all(sorted(origins)[0] == 0 and sorted(origins)[1] > 20 for origins in pieces)
