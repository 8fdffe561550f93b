"""The native engine over models with states in the place of keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop.config.schema.rollout import SpeculationConfig
from strop.models.layouts.sequences import PackedSequences
from strop.models.layouts.states import RowStates
from strop.rollout.base import Request, Sampling
from strop.rollout.native import runner
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.pages import PagedKVCache
from tests.models.hybrids import hybrid

PROMPTS = [[5, 9, 3], [7, 4, 4, 4, 30, 12, 8, 57, 3, 3, 6], [11], list(range(3, 45)), [3, 4, 5, 6, 7, 8]]
SAMPLING = Sampling(temperature=0.8, top_p=0.9, ignore_eos=True, max_tokens=8)


def requests() -> list[Request]:
    return [Request(prompt, n=1 + i % 3, seed=i, max_tokens=4 + 2 * i) for i, prompt in enumerate(PROMPTS)]


def largest_difference(model: Any, asked: list[Request], answers: Any, temperature: float) -> float:
    largest = 0.0
    for request, group in zip(asked, answers, strict=True):
        for answer in group:
            assert answer.error is None
            ids = torch.tensor([[*request.ids, *answer.ids]])
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, len(request.ids) - 1 : -1]
            found = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(answer.ids)[:, None])[:, 0]
            largest = max(largest, float((found - torch.tensor(answer.log_probs)).abs().max()))
    return largest


LIMITS: list[tuple[str, dict[str, Any]]] = [
    ("lfm2", {}),
    ("lfm2", {"max_num_batched_tokens": 7}),
    ("lfm2", {"max_num_seqs": 3, "max_num_batched_tokens": 7, "enable_chunked_prefill": False}),
    ("lfm2", {"cache_bytes": 40_000}),
    ("qwen3_5_text", {"max_num_seqs": 2}),
    ("qwen3_next", {"max_num_batched_tokens": 64}),
]


@pytest.mark.parametrize(("family", "limits"), LIMITS, ids=str)
def test_limits_change_the_order_of_work_and_nothing_else(family: str, limits: dict[str, Any]) -> None:
    """Rows that finish, move and wait; prompts longer than a pass; preemption; two rollouts in a row."""
    model = hybrid(family)
    engine = NativeEngine(model, **limits)
    for _ in range(2):
        answers = engine.generate(requests(), SAMPLING)
        set_back = model.config._attn_implementation
        assert set_back == "sdpa"
        assert largest_difference(model, requests(), answers, 0.8) < 1e-5


def test_states_follow_their_rows_in_a_cache_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "uses_pages", lambda device: True)
    model = hybrid("lfm2")
    engine = NativeEngine(model, max_num_seqs=3)
    answers = engine.generate(requests(), SAMPLING)
    assert engine._step_loop is not None and isinstance(engine._step_loop.runner.cache, PagedKVCache)
    assert largest_difference(model, requests(), answers, 0.8) < 1e-5


def test_new_weights_compute_the_states_again() -> None:
    model = hybrid("lfm2")
    engine = NativeEngine(model)
    engine.generate(requests(), SAMPLING)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    engine.update_weights([], 1)
    answers = engine.generate(requests(), SAMPLING)
    assert largest_difference(model, requests(), answers, 0.8) < 1e-5


def test_states_take_at_most_half_of_the_memory() -> None:
    model = hybrid("mamba2")
    engine = NativeEngine(model, max_num_seqs=64, cache_bytes=100_000)
    answers = engine.generate(
        [Request([3 + i], n=4) for i in range(8)], Sampling(max_tokens=3, ignore_eos=True)
    )
    assert engine._step_loop is not None
    per_row = engine._step_loop.runner.cache.states.bytes_per_row
    assert per_row > 0 and engine._step_loop.scheduler.max_num_seqs == 100_000 // 2 // per_row < 32
    assert all(len(group) == 4 for group in answers)


def test_sequences_of_one_length_run_together() -> None:
    places = [(4, 0, 3), (5, 3, 2), (6, 5, 3), (7, 8, 3)]
    groups = PackedSequences(places, torch.device("cpu"), [False, False, False, True]).by_length
    assert [(one.take.tolist(), one.rows.tolist(), one.continued) for one in groups] == [
        ([[0, 1, 2], [5, 6, 7]], [4, 6], False),
        ([[3, 4]], [5], False),
        ([[8, 9, 10]], [7], True),
    ]


def test_rows_without_states_cost_nothing() -> None:
    states = RowStates()
    assert not states and states.bytes_per_row == 0
    states.resize(8, 0)
    states.copy(torch.tensor([1]), torch.tensor([2]))
    states.clear([1])
    states.free()


def test_guesses_cannot_be_taken_back() -> None:
    model = hybrid("lfm2")
    NativeEngine(model, speculation=SpeculationConfig(enable="auto")).generate([Request([5])], SAMPLING)
    engine = NativeEngine(model, speculation=SpeculationConfig(enable=True))
    with pytest.raises(ValueError, match=r"speculation\.enable=true.*Set it to auto"):
        engine.generate([Request([5])], SAMPLING)


def test_adapters_of_requests_do_not_adapt_modules_inside_mixers() -> None:
    engine = NativeEngine(hybrid("lfm2"))
    path = "model.layers.0.conv.out_proj"
    weights = {f"{path}.lora_A": torch.zeros(2, 32), f"{path}.lora_B": torch.zeros(32, 2)}
    with pytest.raises(ValueError, match=r"conv\.out_proj.*Leave them out of target_modules"):
        engine.load_adapter("one", weights, 1.0)
