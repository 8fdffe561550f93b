"""Models with states continue where their states were kept, and nobody can tell from the numbers."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native import runner, step_loop
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.prefixes.snapshots import StateSnapshots
from tests.models.hybrids import hybrid

PROMPT = [(7 * i * i + 3 * i) % 55 + 3 for i in range(37)]
TOOL = [17, 3, 28, 41, 5, 9, 9]
SAMPLING = Sampling(temperature=0.8, ignore_eos=True, max_tokens=9)


def turns(engine: NativeEngine, count: int, talks: int = 1) -> list[list[tuple[list[int], Completion]]]:
    """Conversations side by side: prompts and answers of each turn."""

    async def talk(number: int) -> list[tuple[list[int], Completion]]:
        ids = [*PROMPT, *([5 + number] * number)]
        found = []
        for turn in range(count):
            request = Request(list(ids), seed=10 * number + turn, max_tokens=7 + turn + number)
            (answer,) = await engine.agenerate(request, SAMPLING)
            assert answer.error is None
            found.append((list(ids), answer))
            ids += [*answer.ids, *TOOL[: 3 + turn]]
        return found

    async def all_of_them() -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(*(talk(number) for number in range(talks)))

    return asyncio.run(all_of_them())


def check_against_a_plain_pass(model: Any, ids: list[int], answer: Completion) -> None:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*ids, *answer.ids]]), use_cache=False).logits
    expected = (
        (logits[0, len(ids) - 1 : -1] / 0.8).log_softmax(-1).gather(-1, torch.tensor(answer.ids)[:, None])
    )
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected[:, 0], atol=1e-5, rtol=1e-5)


FAMILIES = ["qwen3_5_text", "qwen3_next", "lfm2", "falcon_h1", "granitemoehybrid", "mamba2", "kimi_linear"]
FAMILIES += ["falcon_mamba"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_computes_only_what_is_new(family: str) -> None:
    model = hybrid(family)
    engine = NativeEngine(model)
    found = turns(engine, 3, talks=2)
    numbers = engine.stats()
    for talk in found:
        for ids, answer in talk:
            check_against_a_plain_pass(model, ids, answer)
    continued = 0
    for talk in found:
        for (ids, answer), (later, _) in pairwise(talk):
            assert later[: len(ids) + len(answer.ids)] == [*ids, *answer.ids]
            continued += len(ids) + len(answer.ids) - 1  # the newest token was never an input
    assert numbers["continued_tokens"] == continued
    needed = sum(len(ids) for talk in found for ids, _ in talk)
    assert numbers["prompt_tokens"] == needed - continued
    assert numbers["prefix_reuse"] > 0.5
    fresh = NativeEngine(model, enable_prefix_caching=False)
    again = turns(fresh, 3, talks=2)
    assert fresh.stats()["continued_tokens"] == 0
    assert [[answer.ids for _, answer in talk] for talk in again] == [
        [answer.ids for _, answer in talk] for talk in found
    ]


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "mamba2"])
def test_later_samples_of_a_prompt_begin_before_its_last_token(family: str) -> None:
    model = hybrid(family)
    engine = NativeEngine(model, max_num_seqs=2)
    answers = engine.generate([Request(PROMPT, n=6, seed=4)], SAMPLING)[0]
    numbers = engine.stats()
    assert numbers["continued_tokens"] == 2 * (len(PROMPT) - 1), "of three passes the last two continue"
    assert numbers["prompt_tokens"] == len(PROMPT) + 2
    for answer in answers:
        check_against_a_plain_pass(model, PROMPT, answer)
    alone = NativeEngine(model, enable_prefix_caching=False).generate(
        [Request(PROMPT, n=6, seed=4)], SAMPLING
    )[0]
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]


def test_several_steps_between_reads_leave_the_states_of_finished_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: rows finish in the middle of the steps, in a cache of pages, and a short next turn is
    computed by decode steps."""
    monkeypatch.setitem(step_loop.STEPS_PER_SYNC, "cpu", 4)
    monkeypatch.setitem(step_loop._MAX_DECODE_PREFILL, "cpu", 64)
    monkeypatch.setattr(runner, "uses_pages", lambda device: True)
    for family in ("qwen3_5_text", "falcon_h1"):
        model = hybrid(family)
        engine = NativeEngine(model)
        found = turns(engine, 3, talks=3)
        assert engine.stats()["continued_tokens"] > 0
        for talk in found:
            for ids, answer in talk:
                check_against_a_plain_pass(model, ids, answer)


def test_new_weights_and_a_new_phase_forget_all_states() -> None:
    model = hybrid("lfm2")
    engine = NativeEngine(model)
    ids, answer = turns(engine, 1)[0][0]
    later = [*ids, *answer.ids, *TOOL]

    def computed() -> float:
        engine.stats()
        (found,) = asyncio.run(engine.agenerate(Request(later, seed=1), SAMPLING))
        check_against_a_plain_pass(model, later, found)
        return engine.stats()["prompt_tokens"]

    assert computed() == 1 + len(TOOL)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    engine.update_weights([], 1)
    assert computed() == len(later)
    assert computed() == 1, "the state before the last token of the prompt"
    engine.wake()
    assert computed() == len(later)


def test_states_that_are_kept_count_against_the_memory_of_the_cache() -> None:
    model = hybrid("mamba2")
    engine = NativeEngine(model, cache_bytes=400_000, max_num_seqs=8)
    turns(engine, 2, talks=6)
    assert engine._step_loop is not None
    states = engine._step_loop.runner.cache.states
    snapshots = engine._step_loop.scheduler.snapshots
    each = states.bytes_per_row
    assert 0 < len(snapshots) <= snapshots.max_slots == (400_000 - 8 * each) // 4 // each
    held = sum(state.nbytes for kept in states._kept.values() for state in kept.values())
    assert 0 < held <= snapshots.max_slots * each
    budget = engine._step_loop.scheduler.budget
    assert budget == 400_000 - (8 + snapshots.max_slots) * each, "a token of Mamba2 takes one byte here"


def test_the_least_recently_used_state_is_evicted() -> None:
    snapshots = StateSnapshots()
    assert snapshots.add([1, 2], 0) is None, "there is no memory"
    snapshots.set_slots(2)
    assert snapshots.add([1, 2], 0) == 0 and snapshots.add([1, 2, 3], 0) == 1
    assert snapshots.add([1, 2], 0) is None, "it is kept already, and was used now"
    longest = snapshots.find([1, 2, 3, 4], 0, 4)
    assert longest is not None and longest.slot == 1
    shorter = snapshots.find([1, 2, 3, 4], 0, 2)
    assert shorter is not None and shorter.slot == 0
    assert snapshots.find([1, 2, 3, 4], 7, 4) is None, "another adapter computed it"
    assert snapshots.add([9], 0) == 1, "the longer one was not used for the longest time"
    found = snapshots.find([1, 2, 3, 4], 0, 4)
    assert found is not None and len(found.tokens) == 2
    snapshots.set_slots(1)
    assert snapshots.find([9, 9], 0, 2) is None and len(snapshots) == 1
    snapshots.clear()
    assert snapshots.find([1, 2], 0, 2) is None
