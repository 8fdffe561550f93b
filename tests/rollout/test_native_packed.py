"""Packed layers: other speed, same numbers, and nobody outside a rollout sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.cpu import packed_linear as packed
from tests.rollout import tiny
from tests.rollout.test_native import PROMPTS

GREEDY = Sampling(temperature=0, max_tokens=24)
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Layers of tiny models are packed too; the list shows which."""
    found: list[nn.Module] = []
    pack = packed._packed

    def watched(layer: Any) -> Any:
        found.append(layer)
        return pack(layer)

    monkeypatch.setattr(packed, "_packed", watched)
    monkeypatch.setattr(packed, "_SMALLEST", 1)
    monkeypatch.setattr(packed, "_faster", lambda dtype: dtype == torch.float32)
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen2", "lora", "qwen3_moe"])
def test_the_numbers_are_those_of_plain_layers(made: list[nn.Module], kind: str) -> None:
    model = tiny.with_lora() if kind == "lora" else tiny.make(kind)
    answers = NativeEngine(model).generate([Request(p, n=2) for p in PROMPTS], GREEDY)
    assert len(made) >= 2 * 4
    for prompt, group in zip(PROMPTS, answers):
        expected = tiny.plain_greedy(model, prompt, 24)
        assert [c.ids for c in group] == [expected] * 2
        tiny.assert_log_probs(model, prompt, expected, group[0].log_probs)


def test_short_rollouts_are_not_worth_it(made: list[nn.Module]) -> None:
    engine = NativeEngine(tiny.make())
    short = Sampling(temperature=0, max_tokens=packed.STEPS + 1)  # the first token comes from the prefill
    engine.generate([Request(p) for p in PROMPTS], short)
    assert not made
    engine.generate([Request(PROMPTS[0], max_tokens=2)], GREEDY)  # one more step under the same weights
    assert made


def test_rollouts_that_may_become_long_are_packed_before_the_first_step(made: list[nn.Module]) -> None:
    engine = NativeEngine(tiny.make())
    stop = tiny.plain_greedy(tiny.make(), PROMPTS[1], 2)[1]
    ended = Sampling(temperature=0, max_tokens=packed.LONG + 1, stop_ids=(stop,))
    answer = engine.generate([Request(PROMPTS[1])], ended)[0][0]
    assert len(answer.ids) == 2  # one decode step
    assert made


def test_weights_that_change_are_packed_anew_and_training_sees_plain_layers(made: list[nn.Module]) -> None:
    model = tiny.make()
    engine = NativeEngine(model)
    for told in (True, False, True):
        answer = engine.generate([Request(PROMPTS[1], n=2)], GREEDY)[0][0]
        assert answer.ids == tiny.plain_greedy(model, PROMPTS[1], 24)
        assert not any("forward" in layer.__dict__ for layer in model.modules())
        model(input_ids=torch.tensor([PROMPTS[1]]), labels=torch.tensor([PROMPTS[1]])).loss.backward()
        assert all(weight.grad is not None for weight in model.parameters())
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.2)
        if told:
            engine.update_weights([], version=1)
    assert len(made) == 3 * len(set(made))


def test_the_copies_go_when_the_engine_sleeps(made: list[nn.Module]) -> None:
    engine = NativeEngine(tiny.make())
    engine.generate([Request(PROMPTS[1], n=2)], GREEDY)
    assert engine.borrowed_model.packed.changes
    engine.sleep()
    assert not engine.borrowed_model.packed.changes


def test_frozen_weights_are_packed_once_before_the_first_step(made: list[nn.Module]) -> None:
    """Under LoRA: later rollouts use the copies from the first step on, as a resumed run would."""
    model = tiny.with_lora()
    engine = NativeEngine(model)
    base = [layer for layer in model.modules() if type(layer) is nn.Linear and not layer.weight.requires_grad]
    short = Sampling(temperature=0, max_tokens=packed.STEPS - 1)
    for version in (1, 2, 3):
        answer = engine.generate([Request(PROMPTS[1], n=2)], short)[0][0]
        tiny.assert_log_probs(model, PROMPTS[1], answer.ids, answer.log_probs)
        assert {id(layer) for layer in made} == {id(layer) for layer in base}
        assert len(made) == len(base)
        assert not any("forward" in layer.__dict__ for layer in model.modules())
        engine.sleep()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn_like(weight) * 0.1)
        engine.update_weights([], version=version)
        engine.wake()


@pytest.mark.parametrize("through_data", [False, True])
def test_a_frozen_weight_that_changed_all_the_same_is_packed_anew(
    made: list[nn.Module], through_data: bool
) -> None:
    model = tiny.with_lora()
    engine = NativeEngine(model)
    engine.generate([Request(PROMPTS[1], n=2)], GREEDY)
    before = len(made)
    changed = next(one.layer for one in engine.borrowed_model.packed.frozen)
    with torch.no_grad():
        weight = changed.weight.data if through_data else changed.weight
        weight.mul_(1.5)
    engine.update_weights([], version=1)
    answer = engine.generate([Request(PROMPTS[1], n=2)], GREEDY)[0][0]
    assert made[before] is changed
    tiny.assert_log_probs(model, PROMPTS[1], answer.ids, answer.log_probs)
