"""Beginnings that are in the cache are not computed again, and nobody can tell from the numbers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.kv_cache import PrefixCache
from strop.rollout.native.requests import BLOCK, CachedPrefix, block_hashes
from tests.rollout import tiny
from tests.rollout.test_native import PER_TOKEN, count_tokens

PROMPT = [(7 * i * i + 3 * i) % 90 + 1 for i in range(40)]
TOOL = [17, 3, 88, 41, 5]


def warm(model: Any, **settings: Any) -> NativeEngine:
    engine = NativeEngine(model, **settings)
    engine.generate([Request([1])], Sampling(max_tokens=1))
    return engine


def same(a: Completion, b: Completion) -> None:
    assert a.ids == b.ids and a.finish == b.finish
    assert torch.allclose(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral_window", "gemma2_softcap", "gpt_oss_sinks", "lora"])
def test_the_next_turn_computes_only_what_is_new(kind: str) -> None:
    model = tiny.with_lora() if kind == "lora" else tiny.make(kind)
    engine = warm(model)
    seen = count_tokens(model)
    sampling = Sampling(max_tokens=12)
    first = engine.generate([Request(PROMPT, seed=1)], sampling)[0][0]
    talk = [*PROMPT, *first.ids, *TOOL]
    del seen[:]
    second = engine.generate([Request(talk, n=3, seed=2)], sampling)[0]
    assert seen[0] == 1 + len(TOOL), "the newest token of the first turn was never computed, the others were"
    fresh = NativeEngine(model, enable_prefix_caching=False).generate([Request(talk, n=3, seed=2)], sampling)[
        0
    ]
    for a, b in zip(second, fresh):
        same(a, b)
    assert engine.stats()["prefix_reuse"] > 0.7


def test_without_prefix_caching_everything_is_computed() -> None:
    model = tiny.make()
    engine = warm(model, enable_prefix_caching=False)
    engine.generate([Request(PROMPT, seed=1)], Sampling(max_tokens=4))
    seen = count_tokens(model)
    engine.generate([Request(PROMPT, seed=1)], Sampling(max_tokens=4))
    assert seen[0] == len(PROMPT)


def test_finished_sequences_of_any_length_are_moved_whole_out_of_the_way() -> None:
    model = tiny.make()
    engine = warm(model)
    sampling = Sampling(max_tokens=2)
    engine.generate([Request([1], seed=i, max_tokens=2) for i in range(8)], sampling)
    engine.generate([Request([8, *PROMPT[:20]]), Request([9, *PROMPT])], sampling)
    engine.generate([Request([2]), Request([3])], sampling)  # in the rows of the two above
    talk = Request([9, *PROMPT, 4], seed=1)
    seen = count_tokens(model)
    (found,) = engine.generate([talk], sampling)[0]
    assert seen[0] == 1, "all but the new token is there"
    same(found, NativeEngine(model, enable_prefix_caching=False).generate([talk], sampling)[0][0])


def test_episodes_of_one_prompt_share_it_though_each_asks_for_itself() -> None:
    model = tiny.make()
    engine = warm(model)
    seen = count_tokens(model)

    async def crowd() -> list[list[Completion]]:
        return await asyncio.gather(
            *(engine.agenerate(Request(PROMPT, seed=i), Sampling(max_tokens=6)) for i in range(8))
        )

    answers = asyncio.run(crowd())
    assert seen[0] == len(PROMPT) and sum(seen) == len(PROMPT) + 8 * 5
    alone = NativeEngine(model, enable_prefix_caching=False)
    for i, group in enumerate(answers):
        same(group[0], alone.generate([Request(PROMPT, seed=i)], Sampling(max_tokens=6))[0][0])


def test_prompts_seated_together_compute_their_common_beginning_once() -> None:
    model = tiny.make()
    engine = warm(model)
    system = PROMPT + PROMPT[5:35]
    asked = [Request([*system, 80 + i, *([3] * i)], n=2, seed=i) for i in range(5)]
    seen = count_tokens(model)
    answers = engine.generate(asked, Sampling(max_tokens=6))
    assert seen[0] == len(system) + 1, "the shortest goes first"
    assert seen[1] == 4 + 1 + 2 + 3 + 4
    alone = NativeEngine(model, enable_prefix_caching=False)
    for request, group in zip(asked, answers):
        for a, b in zip(group, alone.generate([request], Sampling(max_tokens=6))[0]):
            same(a, b)


@pytest.mark.parametrize("told", [True, False], ids=["update_weights", "trained without a word"])
def test_new_weights_make_all_of_it_worthless(told: bool) -> None:
    model = tiny.make()
    engine = warm(model)
    greedy = Sampling(temperature=0, max_tokens=6)
    first = engine.generate([Request(PROMPT)], greedy)[0][0]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    if told:
        engine.update_weights([], version=1)
    second = engine.generate([Request(PROMPT)], greedy)[0][0]
    assert second.ids == tiny.plain_greedy(model, PROMPT, 6) != first.ids


def test_a_phase_sees_nothing_of_the_one_before() -> None:
    model = tiny.make()
    engine, sampling = warm(model), Sampling(max_tokens=4)
    engine.generate([Request(PROMPT, seed=1)], sampling)
    engine.wake()
    seen = count_tokens(model)
    engine.generate([Request(PROMPT, seed=1)], sampling)
    assert seen[0] == len(PROMPT)


def test_a_row_that_was_not_a_number_is_not_reused() -> None:
    model = tiny.make()
    engine = warm(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[90] = torch.nan
    broken = [90, *PROMPT]
    for _ in range(2):
        assert engine.generate([Request(broken)], Sampling(max_tokens=3))[0][0].finish == "error"
    assert not engine._step_loop or not engine._step_loop.scheduler.prefix_cache.finished


class Talks:
    """Conversations that go on turn by turn."""

    def __init__(self, engine: NativeEngine, count: int) -> None:
        self.engine, self.ids = engine, [[50 + i, *PROMPT] for i in range(count)]

    def remembered(self, talk: int) -> bool:
        """Take the next turn; whether the cache still had the last one."""
        ids = self.ids[talk]
        self.engine.stats()
        (answer,) = asyncio.run(self.engine.agenerate(Request(list(ids)), Sampling(max_tokens=2)))
        computed = self.engine.stats()["prompt_tokens"]
        ids += [*answer.ids, 7]
        return computed < 5


def test_the_least_recently_used_goes_first_and_plain_batches_before_conversations() -> None:
    engine = warm(tiny.make(), max_num_seqs=3)
    talks = Talks(engine, 6)
    assert [talks.remembered(i) for i in (0, 1, 2)] == [False] * 3
    assert talks.remembered(0), "0 is now used more recently than 1"
    assert not talks.remembered(3), "takes the place of 1"
    assert [talks.remembered(i) for i in (0, 2, 3)] == [True] * 3
    assert not talks.remembered(1), "takes the place of 0"
    engine.generate([Request(PROMPT)], Sampling(max_tokens=2))  # takes the place of 2, and is the next to go
    assert not talks.remembered(5)
    assert talks.remembered(3) and talks.remembered(1)


def test_the_cache_grows_for_conversations_within_its_budget() -> None:
    for budget, hits in ((8 * 64, 8), (3 * 64, 0)):
        engine = warm(tiny.make(), cache_bytes=budget * PER_TOKEN)
        talks = Talks(engine, 8)
        assert not any(talks.remembered(i) for i in range(8))
        assert sum(talks.remembered(i) for i in range(8)) == hits
        assert engine._step_loop is not None and engine._step_loop.runner.cache.bytes <= budget * PER_TOKEN


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_crowds_of_conversations_get_what_each_would_get_alone(seed: int) -> None:
    """Few rows, little memory, turns that come and go at random: reuse, moves, evictions and preemptions all at once."""
    draw = random.Random(seed)
    model = tiny.make()
    engine = warm(
        model, max_num_seqs=draw.choice([2, 3, 5, 8]), cache_bytes=draw.choice([256, 500, 4000]) * PER_TOKEN
    )
    plain = NativeEngine(tiny.make(), enable_prefix_caching=False)
    system = PROMPT[: draw.randrange(10, 40)]
    asked: list[tuple[Request, Sampling]] = []
    answered: list[Completion] = []

    async def talk(number: int) -> None:
        ids = [*system, *([number] * (number % 4))]
        for turn in range(4):
            request = Request(list(ids), seed=100 * number + turn)
            sampling = Sampling(max_tokens=1 + (number + turn) % 7, temperature=0.9)
            if len(ids) > 100:
                return
            (answer,) = await engine.agenerate(request, sampling)
            asked.append((request, sampling))
            answered.append(answer)
            ids += [*answer.ids, *TOOL]
            await asyncio.sleep(0.002 * (number % 3))

    async def crowd() -> None:
        await asyncio.gather(*(talk(number) for number in range(12)))

    asyncio.run(crowd())
    assert len(answered) == 12 * 4
    for (request, sampling), answer in zip(asked, answered):
        same(answer, plain.generate([request], sampling)[0][0])


def test_beginnings_of_other_adapters_are_not_found() -> None:
    prefixes = PrefixCache()
    tokens = tuple(range(40))
    for adapter in (0, 3):
        prefixes.add_finished(CachedPrefix(adapter, tokens, adapter=adapter))
    for adapter in (0, 3):
        match = prefixes.find(tokens, block_hashes(tokens, adapter), adapter)
        assert match is not None and match.prefix.adapter == adapter
    assert prefixes.find(tokens, block_hashes(tokens, 4), 4) is None
    # Also where hashes of two adapters are the same by chance.
    assert prefixes.find(tokens, block_hashes(tokens, 3), 4) is None


def test_finished_sequences_are_hashed_when_one_is_looked_for() -> None:
    """The last answers of a batch are outdated by the next weights before anything is looked for."""
    prefixes = PrefixCache()
    finished = [CachedPrefix(row, tuple(range(row, row + 40))) for row in range(3)]
    for prefix in finished:
        prefixes.add_finished(prefix)
    assert not any("hashes" in vars(prefix) for prefix in finished)
    prefixes.remove(finished[1])
    newer = CachedPrefix(7, finished[2].tokens)
    prefixes.add(newer)
    found = [prefixes.find(one.tokens, block_hashes(one.tokens)) for one in finished]
    assert [match and match.prefix for match in found] == [finished[0], None, newer]
    assert "hashes" not in vars(finished[1])
    assert prefixes.find_finished(finished[2].tokens, 0) is finished[2]
    assert prefixes.find_finished(finished[0].tokens, 0) is finished[0]
    prefixes.remove(finished[0])
    assert prefixes.find_finished(finished[0].tokens, 0) is None
    prefixes.clear()
    assert [prefixes.find(one.tokens, one.hashes) for one in finished] == [None] * 3
    assert prefixes.find_finished(finished[2].tokens, 0) is None


def test_the_longest_beginning_is_found() -> None:
    draw = random.Random(1)
    prefixes = PrefixCache()
    held = []
    for row in range(30):
        base = draw.choice(held).tokens[: draw.randrange(60)] if held and draw.random() < 0.7 else ()
        tokens = (*base, *(draw.randrange(5) for _ in range(draw.randrange(1, 60))))
        held.append(CachedPrefix(row, tokens))
        prefixes.add_finished(held[-1])
    for _ in range(200):
        tokens = (*draw.choice(held).tokens[: draw.randrange(70)], *(draw.randrange(5) for _ in range(8)))
        match = prefixes.find(tokens, block_hashes(tokens))
        best = max(
            next(
                (i for i, (a, b) in enumerate(zip(h.tokens, tokens)) if a != b),
                min(len(h.tokens), len(tokens)),
            )
            for h in held
        )
        if match is None:
            assert best < BLOCK
        else:
            assert match.prefix.tokens[: match.num_tokens] == tokens[: match.num_tokens]
            assert match.num_tokens // BLOCK == best // BLOCK, (
                "to the block; within it another row may share a few tokens more"
            )
