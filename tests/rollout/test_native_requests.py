"""Requests on their way: streamed, taken back, cut into goes, and carried over a change of weights."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from strop.rollout.base import (
    Completion,
    Request,
    Sampling,
    merge_spans,
    version_spans,
)
from strop.rollout.continuation import continuation, is_unfinished, join_completions
from strop.rollout.hf import HfEngine
from strop.rollout.native import NativeEngine
from strop.rollout.native.requests import PrefillChunk, RequestState, similar_lengths
from tests.rollout import tiny
from tests.rollout.test_native import PER_TOKEN, PROMPTS, count_tokens

SAMPLING = Sampling(max_tokens=20, temperature=0.9)


def test_who_waits_for_a_request_is_told_once_when_all_of_its_samples_are_there() -> None:
    engine = NativeEngine(tiny.make(), max_num_seqs=2)
    told: list[str] = []
    samples: list[int] = []

    def listen(index: int, ids: list[int], _: list[float]) -> None:
        samples.append(index)

    long = Request(PROMPTS[0], n=3, max_tokens=4, on_tokens=listen, on_done=lambda: told.append("long"))
    short = Request(PROMPTS[1], n=1, max_tokens=1, on_done=lambda: told.append("short"))
    state = engine.submit(long, SAMPLING)
    other = engine.submit(short, SAMPLING)
    with engine.borrowed_model():
        while not state.done:
            assert "long" not in told
            engine.step()
        while not other.done:
            engine.step()
    assert sorted(told) == ["long", "short"] and set(samples) == {0, 1, 2}
    state.fail(RuntimeError("too late"))
    assert len(told) == 2
    failed = RequestState(0, Request(PROMPTS[0], n=2), on_done=lambda one: told.append(str(one.error)))
    failed.fail(RuntimeError("first"))
    failed.fail(RuntimeError("second"))
    assert told[2:] == ["first"]


def test_chunks_of_similar_length_are_padded_together_each_once() -> None:
    lengths = [(0, 1), (5, 3), (0, 3), (0, 20), (7, 22), (0, 40), (0, 22), (0, 100), (9, 100), (0, 9)]
    chunks = [PrefillChunk(row, start, [1] * count) for row, (start, count) in enumerate(lengths)]
    groups = list(similar_lengths([(10 * chunk.row, chunk) for chunk in chunks]))
    found = [sorted(len(chunk.tokens) for _, chunk in group) for group in groups]
    assert found == [[1, 3, 9], [20, 22], [40], [100], [3], [22], [100]]
    assert sorted(offset for group in groups for offset, _ in group) == list(range(0, 100, 10))
    assert all(len({chunk.start > 0 for _, chunk in group}) == 1 for group in groups)


def at_pass(model: Any, number: int, action: Any) -> Any:
    """Do something in the model's forward pass of that number, counted from now."""
    calls = 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            action()

    return model.register_forward_pre_hook(hook)


def disturb(model: Any, seed: int = 5) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw) * 0.1)


# --- streaming ---------------------------------------------------------------------------------------------------------------


def test_tokens_are_streamed_as_they_come_and_add_up_to_the_completion() -> None:
    told: dict[int, list[tuple[list[int], list[float]]]] = {0: [], 1: []}
    engine = NativeEngine(
        tiny.make(), cache_bytes=140 * PER_TOKEN
    )  # too small for both: one is sent back and goes on later

    def listen(sample: int, ids: Any, log_probs: Any) -> None:
        told[sample].append((list(ids), list(log_probs)))

    sampling = Sampling(max_tokens=70)
    answers = engine.generate([Request([5], n=2, seed=1, on_tokens=listen)], sampling)[0]
    assert engine.stats()["preemptions"] > 0
    for sample, completion in enumerate(answers):
        assert [t for ids, _ in told[sample] for t in ids] == completion.ids
        assert [p for _, each in told[sample] for p in each] == completion.log_probs
        assert len(told[sample]) == len(completion.ids), "on a CPU, one by one"


def test_a_listener_that_fails_takes_only_its_own_request_with_it() -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    expected = engine.generate([Request(PROMPTS[0], seed=1)], SAMPLING)

    def listen(sample: int, ids: Any, log_probs: Any) -> None:
        if sample == 1:
            raise KeyError("no such window")

    async def crowd() -> list[Any]:
        asks = [Request(PROMPTS[1], n=2, on_tokens=listen), Request(PROMPTS[0], seed=1)]
        return await asyncio.gather(*(engine.agenerate(r, SAMPLING) for r in asks), return_exceptions=True)

    failure, fine = asyncio.run(crowd())
    assert isinstance(failure, KeyError)
    assert fine[0].ids == expected[0][0].ids
    with pytest.raises(KeyError, match="no such window"):
        engine.generate([Request(PROMPTS[1], n=2, on_tokens=listen)], SAMPLING)
    assert engine.idle
    engine.sleep()


# --- taking back -------------------------------------------------------------------------------------------------------------


def test_abort_of_one_request_leaves_the_others_alone() -> None:
    model = tiny.make()
    engine = NativeEngine(model, max_num_seqs=4)
    keep = Request(PROMPTS[0], n=2, seed=1)
    running, waiting = Request(PROMPTS[1], n=2), Request(PROMPTS[2], n=3)
    alone = engine.generate([keep], SAMPLING)[0]
    handle = at_pass(model, 6, lambda: (engine.abort(running), engine.abort(waiting)))
    found = engine.generate([keep, running, waiting], SAMPLING)
    handle.remove()
    assert [c.ids for c in found[0]] == [c.ids for c in alone]
    assert {c.finish for c in found[1]} == {"abort"} and all(0 < len(c.ids) < 20 for c in found[1])
    assert [(c.finish, c.ids) for c in found[2]] == [("abort", [])] * 3
    assert engine.generate([running], SAMPLING)[0][0].finish == "length", (
        "an abort is over when it was answered"
    )


def test_requests_of_a_call_that_failed_are_not_computed_in_the_next_one() -> None:
    engine = NativeEngine(tiny.make(), max_num_seqs=4)

    def fail(free: int) -> list[Request]:
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        engine.generate([Request(PROMPTS[0], n=3, seed=1)], SAMPLING, more=fail)
    seen = count_tokens(engine.model)
    engine.generate([Request(PROMPTS[1], seed=2)], SAMPLING)
    assert set(seen[1:]) == {1}, "one row per step after the prompt"


def test_a_cancelled_coroutine_frees_its_row() -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    engine.generate([Request([1])], Sampling(max_tokens=1))
    seen = count_tokens(model)
    cancelled = threading.Event()

    def wait_after_five(*_: Any) -> None:
        """On a busy machine, the coroutine that cancels may not run for a while."""
        assert len(seen) < 5 or cancelled.wait(60)

    model.register_forward_pre_hook(wait_after_five)

    async def give_up() -> None:
        lost = asyncio.create_task(engine.agenerate(Request([5]), Sampling(max_tokens=120)))
        stays = asyncio.create_task(engine.agenerate(Request([6]), Sampling(max_tokens=60)))
        while len(seen) < 5:
            await asyncio.sleep(0.001)
        lost.cancel()
        await asyncio.sleep(0)
        cancelled.set()
        (done,) = await stays
        assert len(done.ids) == 60
        with pytest.raises(asyncio.CancelledError):
            await lost

    asyncio.run(give_up())
    assert len(seen) < 80 and engine.idle


def test_the_module_is_back_when_the_last_answer_is() -> None:
    model = tiny.make()
    engine = NativeEngine(model)

    async def often() -> None:
        for i in range(20):
            await engine.agenerate(Request([5, i]), Sampling(max_tokens=2))
            assert model.config._attn_implementation == "sdpa"

    asyncio.run(often())


@pytest.mark.parametrize("kind", [NativeEngine, HfEngine])
def test_the_module_is_back_when_a_cancelled_coroutine_is(kind: Any) -> None:
    """Who trains next would compute wrong gradients in the middle of a decode step."""
    model = tiny.make()
    engine = kind(model)
    passes: list[str] = []
    model.register_forward_pre_hook(lambda *_: passes.append("begun"))
    model.register_forward_hook(lambda *_: passes.append("done"))

    async def often() -> None:
        for steps in range(6):
            passes.clear()
            asked = asyncio.create_task(engine.agenerate(Request([5, steps]), Sampling(max_tokens=120)))
            await asyncio.sleep(0)
            while len(passes) < 3 * steps:
                await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            seen = len(passes)
            assert model.config._attn_implementation == "sdpa" and seen % 2 == 0
            await asyncio.sleep(0.02)
            assert len(passes) == seen

    asyncio.run(often())


# --- over a change of weights ------------------------------------------------------------------------------------------------


def test_requests_in_flight_go_on_under_new_weights_and_say_which_sampled_what() -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    before = tiny.make()

    def update() -> None:
        disturb(model)
        engine.update_weights([], version=3)

    # In the middle of a step the engine's lock is held by this very thread: do it between two steps.
    tickets = [engine.submit(Request(p, n=2, seed=i), SAMPLING) for i, p in enumerate(PROMPTS[:3])]
    with engine.borrowed_model():
        for _ in range(7):
            engine.step()
        update()
        while not engine.idle:
            engine.step()
    for prompt, ticket in zip(PROMPTS, tickets):
        for completion in ticket.result():
            assert completion.version == 3 and completion.versions == [(0, 8), (3, 12)]
            old = tiny.plain_log_probs(before, prompt, completion.ids, 0.9)[:8]
            new = tiny.plain_log_probs(model, prompt, completion.ids, 0.9)[8:]
            expected = torch.cat([old, new]).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
            assert (torch.tensor(completion.log_probs) - expected).abs().max() < 1e-4, (
                "the whole context is of the new weights"
            )


def test_weights_that_sampled_nothing_do_not_give_their_version() -> None:
    engine = NativeEngine(tiny.make())
    tickets = [engine.submit(Request(PROMPTS[0], n=2, seed=1), SAMPLING)]
    with engine.borrowed_model():
        for _ in range(4):
            engine.step()
        engine.update_weights([], version=3)
        engine.abort()
        tickets.append(engine.submit(Request(PROMPTS[1]), SAMPLING))
        while not engine.idle:
            engine.step()
    for completion in tickets[0].result():
        assert completion.finish == "abort" and len(completion.ids) == 5
        assert version_spans(completion) == [(0, 5)] and completion.version == 0
    assert tickets[1].result()[0].version == 3


def test_a_request_can_be_aborted_while_another_one_is() -> None:
    """A callback runs in the middle of an abort, as a thread might."""
    engine = NativeEngine(tiny.make())
    second = Request(PROMPTS[1])
    first = Request(PROMPTS[0], on_done=lambda: engine.abort(second))
    tickets = [engine.submit(request, SAMPLING) for request in (first, second)]
    with engine.borrowed_model():
        engine.step()
        engine.abort(first)
        while not engine.idle:
            engine.step()
    assert [ticket.result()[0].finish for ticket in tickets] == ["abort", "abort"]


def slices(engine: NativeEngine, request: Request, longest: int, size: int) -> list[Completion]:
    """An answer in goes of `size` tokens."""
    found = engine.generate([Request(request.ids, request.n, request.seed, size)], SAMPLING)[0]
    while any(is_unfinished(c, longest) for c in found):
        open_ones = [i for i, c in enumerate(found) if is_unfinished(c, longest)]
        again = [continuation(request, i, found[i], longest, size) for i in open_ones]
        for i, (more,) in zip(open_ones, engine.generate(again, SAMPLING)):
            found[i] = join_completions(found[i], more)
    return found


@pytest.mark.parametrize("size", [1, 7, 20])
def test_an_answer_in_slices_is_the_answer(size: int) -> None:
    model = tiny.make()
    request = Request(PROMPTS[1], n=3, seed=11)
    whole = NativeEngine(model).generate([request], SAMPLING)[0]
    cut = slices(NativeEngine(model), request, SAMPLING.max_tokens, size)
    assert [c.ids for c in cut] == [c.ids for c in whole]
    assert [c.finish for c in cut] == [c.finish for c in whole]
    for a, b in zip(cut, whole):
        assert torch.allclose(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4)


def test_an_aborted_answer_is_taken_up_again_after_an_update() -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    request = Request(PROMPTS[1], n=2, seed=4)
    handle = at_pass(model, 6, engine.abort)
    found = engine.generate([request], SAMPLING)[0]
    handle.remove()
    assert all(is_unfinished(c, 20) and c.finish == "abort" for c in found)
    had = len(found[0].ids)
    disturb(model)
    engine.update_weights([], version=1)
    more = engine.generate([continuation(request, i, c, 20) for i, c in enumerate(found)], SAMPLING)
    for before, (after,) in zip(found, more):
        whole = join_completions(before, after)
        assert len(whole.ids) == len(whole.log_probs) == 20 and whole.ids[:had] == before.ids
        assert (whole.finish, whole.version, whole.versions) == ("length", 1, [(0, had), (1, 20 - had)])
        tiny.assert_log_probs(model, PROMPTS[1], whole.ids, after.log_probs, 0.9, first=had)


def test_joining_keeps_the_order_of_versions() -> None:
    a = Completion([1, 2], [-0.1, -0.2], "abort", 4)
    b = Completion([3], [-0.3], "abort", 4)
    c = Completion([5, 6], [-0.5, -0.6], "stop", 6, versions=[(5, 1), (6, 1)])
    both = join_completions(a, b)
    assert both.versions == [] and version_spans(both) == [(4, 3)]
    assert join_completions(both, c).versions == [(4, 3), (5, 1), (6, 1)]
    assert merge_spans([(1, 0), (2, 3), (2, 1), (1, 2)]) == [(2, 4), (1, 2)]
    assert not is_unfinished(c, 99) and not is_unfinished(Completion([1], [0.0], "length"), 1)
    unsampled = join_completions(a, Completion([], [], "abort", 5))
    assert (unsampled.version, unsampled.versions) == (4, []), "the weights of version 5 sampled nothing"
    assert join_completions(unsampled, c).versions == [(4, 2), (5, 1), (6, 1)]
    with pytest.raises(ValueError, match="3 of 3 tokens: there is nothing left"):
        continuation(Request([1]), 0, both, 3)
