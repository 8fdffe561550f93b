"""Stopping an engine in the middle of its requests: the answers are those of one that never stopped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer
from strop.rollout.base import Completion, Request, Sampling, build_engine, truncate_spans
from strop.rollout.interruptible import EndedRequest, Interruptible

TOKENS = 40
SAMPLING = Sampling(max_tokens=TOKENS)
REQUESTS = [Request([3 + i, 5, 7], n=3, seed=11 + i, max_tokens=TOKENS - i) for i in range(4)]


@pytest.fixture
def engine() -> Any:
    made = build_engine("native", tiny_model(tiny_tokenizer(), hidden=32), max_model_len=64)
    yield made
    made.close()


class Alarm:
    """Calls `ring` from another thread when so many tokens were sampled."""

    def __init__(self, steady: Interruptible, at: list[int], ring: Callable[[int], None]) -> None:
        self.left, self.ring, self.steps, self.number, self.aborts = list(at), ring, 0, 0, 0
        engine: Any = steady.engine
        step, abort = engine.step, engine.abort

        def count_abort() -> None:
            abort()
            self.aborts += 1

        def counted() -> None:
            step()
            self.steps += 1
            if self.left and self.steps >= self.left[0]:
                self.left.pop(0)
                self.number += 1
                ringing = threading.Thread(target=ring, args=(self.number,))
                aborts = self.aborts
                ringing.start()
                # Until the door is shut, and who is inside is cut.
                while ringing.is_alive() and (self.aborts == aborts if steady.cut else steady._open):
                    time.sleep(0.001)

        engine.step, engine.abort = counted, count_abort


def test_cut_twice_under_the_same_weights_is_token_exact(engine):
    whole = engine.generate(REQUESTS, SAMPLING)
    steady = Interruptible(engine, cut=True)

    def pause(number: int) -> None:
        with steady.stopped():
            assert engine.idle

    Alarm(steady, [5, 20], pause)
    cut = steady.generate(REQUESTS, SAMPLING)
    for a, b in zip(whole, cut, strict=True):
        assert [c.ids for c in a] == [c.ids for c in b]
        assert [c.finish for c in a] == [c.finish for c in b]
        for one, two in zip(a, b):
            assert torch.allclose(torch.tensor(one.log_probs), torch.tensor(two.log_probs), atol=1e-5)


def test_each_stretch_has_the_version_and_the_log_probs_of_the_weights_that_sampled_it(engine):
    steady = Interruptible(engine, cut=True)
    generator = torch.Generator().manual_seed(0)
    modules: dict[int, Any] = {}

    def copy() -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}

    modules[0] = copy()

    def update(number: int) -> None:
        moved = {name: w + 0.05 * torch.randn(w.shape, generator=generator) for name, w in copy().items()}
        steady.update_weights(moved.items(), number)
        modules[number] = copy()

    Alarm(steady, [6, 15], update)
    answers = steady.generate(REQUESTS, SAMPLING)
    mixed = [(r, c) for r, found in zip(REQUESTS, answers) for c in found if c.versions]
    assert mixed and max(len(c.versions) for _, c in mixed) == 3
    for request, completion in mixed:
        assert (
            sum(count for _, count in completion.versions) == len(completion.ids) == len(completion.log_probs)
        )
        ids, place = torch.tensor([[*request.ids, *completion.ids]]), 0
        for version, count in completion.versions:
            with torch.no_grad():
                for name, weight in engine.model.named_parameters():
                    weight.copy_(modules[version][name])
                said = engine.model(ids).logits[0].log_softmax(-1)
            for i in range(place, place + count):
                at = len(request.ids) + i
                assert abs(float(said[at - 1, ids[0, at]]) - completion.log_probs[i]) < 1e-4
            place += count


def test_without_cutting_a_stop_waits(engine):
    steady = Interruptible(engine, cut=False)
    Alarm(steady, [3], lambda number: steady.update_weights((), number))
    first = steady.generate(REQUESTS, SAMPLING)
    assert all(c.version == 0 and not c.versions and c.finish != "abort" for found in first for c in found)
    deadline = time.time() + 60
    while engine.version == 0 and time.time() < deadline:
        time.sleep(0.01)
    assert engine.version == 1


def test_each_sample_is_streamed_whole(engine):
    steady = Interruptible(engine, cut=True)

    def pause(number: int) -> None:
        with steady.stopped():
            pass

    Alarm(steady, [4, 9], pause)
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def on_tokens(sample: int, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        heard[sample] += ids

    [found] = steady.generate([replace(REQUESTS[0], on_tokens=on_tokens)], SAMPLING)
    assert [c.ids for c in found] == list(heard.values())


def test_coroutines_are_continued_too(engine):
    whole = engine.generate(REQUESTS, SAMPLING)
    steady = Interruptible(engine, cut=True)

    def pause(number: int) -> None:
        with steady.stopped():
            pass

    Alarm(steady, [4, 9], pause)

    async def all_of_them() -> list[list[Completion]]:
        return list(await asyncio.gather(*(steady.agenerate(request, SAMPLING) for request in REQUESTS)))

    assert [[c.ids for c in found] for found in asyncio.run(all_of_them())] == [
        [c.ids for c in found] for found in whole
    ]


def test_nobody_waits_for_an_engine_that_has_ended(engine):
    steady = Interruptible(engine, cut=True)
    steady.stop()
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            steady.generate(REQUESTS, SAMPLING)
        except EndedRequest as problem:
            problems.append(problem)

    waiting = threading.Thread(target=ask)
    waiting.start()
    steady.end()
    waiting.join(60)
    assert not waiting.is_alive() and len(problems) == 1


class Forgetful:
    """An engine that begins a seed's stream again with every request, and cuts every other answer."""

    version = 0
    same_stream = False

    def __init__(self) -> None:
        self.seeds: list[tuple[int | None, int]] = []

    def generate(self, requests: list[Request], sampling: Sampling) -> list[list[Completion]]:
        self.seeds += [(request.seed, request.first) for request in requests]
        cut = len(self.seeds) <= 1
        return [[Completion([1], [0.0], "abort" if cut else "stop") for _ in range(r.n)] for r in requests]

    def abort(self) -> None: ...


def test_engines_that_begin_streams_again_get_new_ones():
    engine = Forgetful()
    [answers] = Interruptible(engine, cut=True).generate([Request([1, 2], n=3, seed=5)], SAMPLING)  # type: ignore[arg-type]
    assert [c.ids for c in answers] == [[1, 1]] * 3
    assert engine.seeds[0] == (5, 0)
    assert len({seed for seed, _ in engine.seeds}) == 4, "each sample goes on with numbers of its own"


def test_stretches_of_the_first_tokens():
    assert truncate_spans([(0, 3), (1, 4)], 5) == [(0, 3), (1, 2)]
    assert truncate_spans([(0, 3), (1, 4)], 2) == [(0, 2)]
