"""The few tokens of a conversation's next turn ride along with decode steps, and nobody can tell from the answers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native import step_loop as batch
from tests.rollout import tiny
from tests.rollout.test_native import PER_TOKEN, count_tokens
from tests.rollout.test_native_prefix import PROMPT, TOOL, same, warm

WAYS = [
    Sampling(max_tokens=10),
    Sampling(max_tokens=10, temperature=0, repetition_penalty=1.2),
    Sampling(max_tokens=9, top_k=5),
]


def fed(monkeypatch: pytest.MonkeyPatch, model: Any, **settings: Any) -> NativeEngine:
    monkeypatch.setattr(batch, "_MAX_DECODE_PREFILL", {"cpu": 16})
    return warm(model, **settings)


@pytest.mark.parametrize("sampling", WAYS, ids=["plain", "greedy", "top-k"])
@pytest.mark.parametrize("kind", ["llama", "mistral_window", "gpt_oss_sinks"])
def test_the_next_turn_needs_no_pass_of_its_own(monkeypatch, kind, sampling):
    model = tiny.make(kind)
    engine = fed(monkeypatch, model)
    first = engine.generate([Request(PROMPT, seed=1)], sampling)[0][0]
    talk = [*PROMPT, *first.ids, *TOOL]
    seen = count_tokens(model)
    second = engine.generate([Request(talk, n=3, seed=2)], sampling)[0]
    # Three rows of one token each: first those of the turn that they are given, then those they sample.
    assert len(seen) == 1 + len(TOOL) + max(len(c.ids) for c in second) - 1 and max(seen) == 3
    fresh = NativeEngine(model, enable_prefix_caching=False).generate([Request(talk, n=3, seed=2)], sampling)[
        0
    ]
    for a, b in zip(second, fresh):
        same(a, b)


def test_a_stop_token_in_what_is_given_stops_nothing(monkeypatch):
    model = tiny.make()
    sampling = Sampling(max_tokens=8, stop_ids=tuple(TOOL))
    engine = fed(monkeypatch, model)
    engine.generate([Request(PROMPT, seed=1)], sampling)
    found = engine.generate([Request([*PROMPT, *TOOL], seed=4)], sampling)[0][0]
    same(
        found,
        NativeEngine(model, enable_prefix_caching=False).generate(
            [Request([*PROMPT, *TOOL], seed=4)], sampling
        )[0][0],
    )
    assert found.ids


def test_others_copy_only_what_was_computed(monkeypatch):
    """A row that is still fed does not have the keys of its last tokens."""
    model = tiny.make()
    engine, sampling = fed(monkeypatch, model, max_num_seqs=3), Sampling(max_tokens=6)
    engine.generate([Request(PROMPT, seed=0)], sampling)
    long = [*PROMPT, *TOOL, *TOOL]
    first = engine.submit(Request(long, n=2, seed=1), sampling)
    with engine.borrowed_model():
        engine.step()
        second = engine.submit(Request([*long, 9], n=2, seed=2), sampling)
        while not (first.done and second.done):
            engine.step()
    plain = NativeEngine(model, enable_prefix_caching=False)
    expected = plain.generate([Request(long, n=2, seed=1), Request([*long, 9], n=2, seed=2)], sampling)
    for a, b in zip([*first.result(), *second.result()], [*expected[0], *expected[1]]):
        same(a, b)


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 5}, {"cache_bytes": 400 * PER_TOKEN}], ids=["free", "crowded", "tight"]
)
def test_crowds_of_conversations_get_what_each_would_get_alone(monkeypatch, settings):
    model = tiny.make()
    engine, alone = fed(monkeypatch, model, **settings), NativeEngine(model, enable_prefix_caching=False)
    draw = random.Random(3)
    turns = {
        number: [[draw.randrange(1, 90) for _ in range(draw.randrange(1, 22))] for _ in range(3)]
        for number in range(10)
    }
    told: list[tuple[list[int], int, Completion]] = []

    async def talk(number: int) -> None:
        ids = PROMPT[: 20 + number % 3]
        for turn, words in enumerate(turns[number]):
            ids = [*ids, *words]
            seed = 10 * number + turn
            (answer,) = await engine.agenerate(
                Request(list(ids), seed=seed), Sampling(max_tokens=3 + number % 4)
            )
            told.append((list(ids), seed, answer))
            ids += answer.ids

    async def crowd() -> None:
        await asyncio.gather(*(talk(number) for number in range(10)))

    asyncio.run(crowd())
    engine.close()
    assert len(told) == 30
    for ids, seed, answer in told:
        expected = alone.generate([Request(ids, seed=seed)], Sampling(max_tokens=len(answer.ids)))[0][0]
        assert answer.ids == expected.ids
        assert torch.allclose(torch.tensor(answer.log_probs), torch.tensor(expected.log_probs), atol=1e-4)


def test_new_weights_in_the_middle_lose_nothing(monkeypatch):
    model = tiny.make()
    engine, sampling = fed(monkeypatch, model), Sampling(max_tokens=6)
    engine.generate([Request(PROMPT, seed=0)], sampling)
    ticket = engine.submit(Request([*PROMPT, *TOOL], seed=1), sampling)
    with engine.borrowed_model():
        engine.step()
        engine.update_weights(
            [(name, 1.01 * weight.detach()) for name, weight in model.named_parameters()], version=1
        )
        while not ticket.done:
            engine.step()
    expected = NativeEngine(model, enable_prefix_caching=False).generate(
        [Request([*PROMPT, *TOOL], seed=1)], sampling
    )[0][0]
    same(ticket.result()[0], expected)


def test_what_was_dropped_while_it_was_fed_is_not_copied(monkeypatch):
    model = tiny.make()
    engine, sampling = fed(monkeypatch, model), Sampling(max_tokens=6)
    engine.generate([Request(PROMPT, seed=0)], sampling)
    long = [*PROMPT, *TOOL, *TOOL, *TOOL]
    dropped = Request(long, seed=1)
    ticket = engine.submit(dropped, sampling)
    with engine.borrowed_model():
        engine.step()
        engine.abort(dropped)
        engine.step()
    assert ticket.result()[0].finish == "abort" and not ticket.result()[0].ids
    found = engine.generate([Request([*long, 9], seed=2)], sampling)[0][0]
    same(
        found,
        NativeEngine(model, enable_prefix_caching=False).generate([Request([*long, 9], seed=2)], sampling)[0][
            0
        ],
    )
