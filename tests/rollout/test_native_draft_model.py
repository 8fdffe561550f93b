"""A draft model in the native engine: the policy's distribution, greedy tokens, rows that come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.sampler import SamplingTensors, probabilities
from tests.rollout import tiny
from tests.rollout.test_native import ids
from tests.rollout.test_native_speculation import PROMPTS, REQUESTS, assert_same


def drafted(policy: Any, draft: Any, folder: Path, num_tokens: int = 3, **settings: Any) -> NativeEngine:
    draft.save_pretrained(folder)
    speculation = SpeculationConfig(enable=True, num_tokens=num_tokens, draft_model=str(folder))
    return NativeEngine(policy, speculation=speculation, **settings)


def near(model: Any, noise: float) -> Any:
    """A model of the same size with other weights."""
    other = tiny.make()
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * noise)
    return other


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 3}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_greedy_tokens_are_those_without(tmp_path: Path, limits: dict[str, Any]) -> None:
    """Rows finish, move and are admitted while others run; every tenth weight matters."""
    model = tiny.make()
    expected = NativeEngine(model, **limits).generate(REQUESTS, Sampling(temperature=0))
    engine = drafted(model, near(model, 0.01), tmp_path, **limits)
    assert_same(engine.generate(REQUESTS, Sampling(temperature=0)), expected)
    stats = engine.stats()
    assert 0.2 < stats["speculation/acceptance"] < 1 and stats["speculation/share_of_steps"] == 1


@pytest.mark.parametrize(
    "way", [Sampling(), Sampling(temperature=0.6, top_k=9, top_p=0.9)], ids=["", "filters"]
)
def test_a_draft_model_that_is_the_policy_is_always_right(tmp_path: Path, way: Sampling) -> None:
    """So its cache holds what the policy's cache holds, through passes with and without drafts."""
    model = tiny.make()
    engine = drafted(model, model, tmp_path)
    for _ in range(2):
        answers = engine.generate(REQUESTS, way)
        assert engine.stats()["speculation/acceptance"] > 0.98
    for request, group in zip(REQUESTS, answers):
        for one in group:
            tiny.assert_log_probs(model, request.ids, one.ids, one.log_probs, way.temperature)


def test_rows_that_it_did_not_follow_are_computed_before_the_next_draft(tmp_path: Path) -> None:
    """With more rows than max_rows nothing is drafted; the tail is."""
    model = tiny.make()
    model.save_pretrained(tmp_path)
    settings = SpeculationConfig(enable=True, num_tokens=3, max_rows=4, draft_model=str(tmp_path))
    engine = NativeEngine(model, speculation=settings)
    engine.generate(REQUESTS, Sampling())
    stats = engine.stats()
    assert 0 < stats["speculation/share_of_steps"] < 1 and stats["speculation/acceptance"] > 0.98


def test_the_distribution_is_the_policys(tmp_path: Path) -> None:
    """Known probabilities of policy and draft model: tokens and pairs of tokens are those of the policy, and
    as many drafts are kept as the two have in common."""
    chances = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    models = []
    for row in chances:
        logits = torch.full((tiny.VOCABULARY,), -40.0)
        logits[3:6] = row.log()
        models.append(tiny.fixed(logits))
    engine = drafted(models[0], models[1], tmp_path, max_num_seqs=64)
    answers = engine.generate([Request([3], n=64, seed=s) for s in range(3)], Sampling(max_tokens=24))
    stats = engine.stats()
    tokens = torch.tensor([c.ids for group in answers for c in group])
    counts = torch.bincount(tokens.flatten(), minlength=6)[3:6].double()
    expected = counts.sum() * chances[0].double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 13.8  # 0.1% of 2 degrees of freedom
    pairs = torch.bincount((tokens[:, :-1] * 10 + tokens[:, 1:]).flatten(), minlength=60).double()
    pair_counts = torch.stack([pairs[10 * a + b] for a in (3, 4, 5) for b in (3, 4, 5)])
    pair_expected = (chances[0][:, None] * chances[0]).flatten().double() * pair_counts.sum()
    assert float(((pair_counts - pair_expected) ** 2 / pair_expected).sum()) < 26.1  # 8 degrees
    common = float(chances.amin(0).sum())
    first_of_three = common / 3 * (1 + common + common**2)  # a draft counts if those before it were kept
    assert stats["speculation/acceptance"] == pytest.approx(first_of_three, abs=0.04)


def test_probabilities_are_those_that_tokens_are_drawn_from() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 4)
    settings = SamplingTensors(
        temperature=torch.tensor([1.0, 0.5, 1.0, 1.0]),
        greedy=torch.tensor([False, False, False, True]),
        top_k=torch.tensor([4, 4, 2, 4]),
        max_top_k=4,
    )
    found = probabilities(logits, settings)
    two = logits[0, :2].softmax(-1)
    expected = [logits[0].softmax(-1), (2 * logits[0]).softmax(-1), torch.cat([two, torch.zeros(2)])]
    torch.testing.assert_close(found, torch.stack([*expected, torch.tensor([1.0, 0, 0, 0])]))


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    draft = tiny.make()
    draft.resize_token_embeddings(tiny.VOCABULARY + 5)
    engine = drafted(tiny.make(), draft, tmp_path)
    with pytest.raises(
        ValueError, match=f"{tiny.VOCABULARY + 5} tokens, the policy one of {tiny.VOCABULARY}"
    ):
        engine.generate([Request(PROMPTS[0])], Sampling(max_tokens=2))


def test_weights_of_the_policy_may_change_in_the_middle(tmp_path: Path) -> None:
    model = tiny.make()
    engine = drafted(model, near(model, 0.01), tmp_path)
    states = [engine.submit(request, Sampling(temperature=0)) for request in REQUESTS]
    with engine.borrowed_model():
        while not engine.idle:
            engine.step()
            engine.update_weights((), 1)
    expected = NativeEngine(model).generate(REQUESTS, Sampling(temperature=0))
    assert ids([state.result() for state in states]) == ids(expected)
