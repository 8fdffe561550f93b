"""Conversations with an engine that records experts (router_replay.mode=R3): each row has those of its tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import torch

from strop.agents.episode import Episode
from strop.backends.base import MicroBatching
from strop.backends.single import SingleBackend
from strop.ppo.rank_sharing import PackedTrajectories
from strop.replay.recording import trajectories_as_json, trajectories_of
from strop.rollout.base import Sampling
from strop.rollout.native import NativeEngine
from strop.types import Trajectory, batch_of
from tests.agents.stage import TOKENIZER, episode_context, prompt
from tests.backends.make import make_backend
from tests.backends.replay_checks import chosen
from tests.models.tiny import tiny_model


def converse(model: Any, until: str | None = None) -> Trajectory:
    """Two answers, the first of which is cut before `until`, and a message of the user after each."""
    engine = NativeEngine(model, record_experts=True, max_model_len=512)
    scene = episode_context(engine, max_model_len=512)
    episode = Episode(scene, prompt(), Sampling(), seeds=(1, 0))

    async def talk() -> None:
        await episode.answer(max_tokens=9, until=until)
        assert episode.tell({"role": "user", "content": "no"})
        await episode.answer(max_tokens=6)
        assert episode.tell({"role": "user", "content": "thanks"})

    try:
        asyncio.run(talk())
    finally:
        engine.close()
    return episode.trajectory()


def test_a_conversation_has_the_experts_of_exactly_its_tokens() -> None:
    model = tiny_model("qwen3_moe", vocab_size=len(TOKENIZER), max_position_embeddings=512)
    whole = converse(model)
    first = whole.turns[0]
    until = TOKENIZER.decode(whole.response[first.start + 3 : first.start + 4])
    cut = converse(model, until)
    assert 0 < cut.turns[0].end < first.end, "the first answer is cut"
    for sample in (whole, cut):
        ids = [*sample.prompt.ids, *sample.response]
        known = len(sample.prompt.ids) + sample.turns[2].end - 1
        assert sample.experts is not None and len(sample.experts) == known
        assert np.array_equal(sample.experts, chosen(model, ids)[:known])
        sample.score = 1.0
    batch = batch_of([whole, cut])
    backend = make_backend(SingleBackend, model, router_replay="R3")
    found = backend.forward(batch, ["log_probs"], MicroBatching(rows=2)).log_probs
    assert found is not None and batch.rollout_log_probs is not None
    assert ((found - batch.rollout_log_probs) * batch.mask).abs().max() < 1e-5, "sampled = recomputed"
    wrong = (batch.experts + 1) % model.config.num_experts  # type: ignore[operator]
    other = backend.forward(batch.replace(experts=wrong), ["log_probs"], MicroBatching(rows=2)).log_probs
    assert other is not None and ((found - other) * batch.mask).abs().max() > 1e-2
    [restored] = trajectories_of(json.loads(json.dumps(trajectories_as_json([cut]))))  # trainer.record_steps
    assert np.array_equal(restored.experts, cut.experts)  # type: ignore[arg-type]
    [received] = PackedTrajectories.pack([cut], {0: cut.prompt}).unpack({0: cut.prompt})
    assert received.experts is not None and np.array_equal(received.experts, cut.experts)  # type: ignore[arg-type]
    assert torch.equal(batch_of([received]).experts, batch_of([cut]).experts)  # type: ignore[arg-type]
