"""Rows that hold the same tokens take a step together on a CPU: fewer rows computed, the same answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.native import NativeEngine, decode_rows
from strop.rollout.native.requests import ScheduledSample
from tests.rollout import tiny

PROMPTS = [[5, 9, 2], [7, 1, 1, 4, 30, 12, 8], [11], [5, 9, 2]]


def sure(kind: str = "llama") -> Any:
    """A model whose next tokens are nearly certain, so that samples agree for a while."""
    model = tiny.make(kind)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    return model


def rows_of_steps(model: Any) -> list[int]:
    """Rows of each decode step from now on."""
    seen: list[int] = []

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        if given["input_ids"].shape[1] == 1:
            seen.append(len(given["input_ids"]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def answers(model: Any, sampling: Sampling, **limits: Any) -> list[list[Completion]]:
    requests = [Request(p, n=6, seed=i, max_tokens=4 + 3 * i) for i, p in enumerate(PROMPTS)]
    return NativeEngine(model, **limits).generate(requests, sampling)


@pytest.mark.parametrize("kind", ["llama", "mistral_window", "gemma2_softcap"])
@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 5}], ids=["all at once", "in turns"])
def test_together_and_apart_give_the_same_answers(
    kind: str, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sure(kind)
    sampling = Sampling(temperature=0.7, repetition_penalty=1.1)
    seen = rows_of_steps(model)
    together = answers(model, sampling, **limits)
    computed = sum(seen)
    seen.clear()
    monkeypatch.setattr(decode_rows, "_MAX_DISTINCT_SHARE", -1.0)
    apart = answers(model, sampling, **limits)
    assert computed < sum(seen)
    for ours, theirs in zip(together, apart):
        for a, b in zip(ours, theirs):
            assert (a.ids, a.finish) == (b.ids, b.finish)
            torch.testing.assert_close(
                torch.tensor(a.log_probs), torch.tensor(b.log_probs), rtol=1e-4, atol=1e-5
            )


def test_greedy_samples_of_a_prompt_are_computed_once() -> None:
    model = tiny.make()
    seen = rows_of_steps(model)
    engine = NativeEngine(model)
    found = engine.generate(
        [Request(PROMPTS[1], n=8), Request(PROMPTS[0], n=8)], Sampling(temperature=0.0, max_tokens=6)
    )
    assert max(seen) == 2
    assert all(completion.ids == group[0].ids for group in found for completion in group)


def test_groups_split_exactly_where_tokens_differ() -> None:
    groups = decode_rows.RowGroups()
    numbers = torch.tensor(
        groups.new_groups(
            [ScheduledSample(0, 0, [1], 9), ScheduledSample(0, 1, [1], 9), ScheduledSample(1, 0, [1], 9)],
            [False] * 3,
        )
    )
    assert numbers[0] == numbers[1] != numbers[2]
    agreed = groups.split(numbers, torch.tensor([7, 7, 7]))
    assert agreed[0] == agreed[1] != agreed[2]
    found = groups.shared_rows(agreed)
    assert found is not None and found.first.tolist() == [0, 2] and found.group.tolist() == [0, 0, 1]
    parted = groups.split(agreed, torch.tensor([7, 8, 7]))
    assert len(set(parted.tolist())) == 3 and groups.shared_rows(parted) is None
    late = groups.new_groups(
        [ScheduledSample(0, 2, [1], 9), ScheduledSample(0, 3, [1], 9, tokens=[7])], [False] * 2
    )
    assert not set(late) & set(parted.tolist()) and len(set(late)) == 2
