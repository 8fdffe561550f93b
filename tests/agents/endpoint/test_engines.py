"""The endpoint over an engine with weights of its own (vLLM): calls are recorded as they were sampled."""

from __future__ import annotations

import pytest
import torch

from strop.rollout.base import Request, Sampling
from tests.agents.endpoint.clients import Client, run_agent
from tests.agents.stage import TOKENIZER
from tests.rollout import engines

QUESTION = [{"role": "user", "content": "2+2?"}]


@pytest.mark.vllm
@pytest.mark.slow
def test_the_second_call_continues_the_tokens_that_vllm_sampled() -> None:
    small = engines.model("vllm")
    small.config.vocab_size = len(TOKENIZER)
    small.config.max_position_embeddings = 512
    torch.manual_seed(0)
    model = type(small)(small.config).eval()
    engine = engines.build("vllm", model)
    # The first tokens compile code, which can take longer than a client waits.
    engine.generate([Request([5, 6, 7], seed=1)], Sampling(max_tokens=8))
    chunks: list[str] = []

    async def agent(client: Client) -> None:
        first = await client.chat(QUESTION, max_tokens=8)
        more = [*QUESTION, first, {"role": "user", "content": "?"}]
        await client.chat(more, max_tokens=8)
        stream = {"messages": [*more, {"role": "user", "content": "!"}], "stream": True, "max_tokens": 8}
        reply = await client.post("/v1/chat/completions", stream)
        chunks.extend(reply.text.split("\n\n"))

    try:
        [episode] = run_agent(agent, engine, max_model_len=512)
    finally:
        engines.forget(model)
    assert episode.error is None and episode.counts["calls"] == 3 and chunks[-2] == "data: [DONE]"
    sample = episode.trajectory()
    [talk] = sample.branches  # the third call leaves the second answer out: a sequence of its own
    assert [turn.role for turn in talk.turns] == ["assistant", "user", "assistant"]
    assert [turn.role for turn in sample.turns] == ["assistant"]
    for row in (sample, *sample.branches):
        ids = torch.tensor([[*row.prompt.ids, *row.response]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(row.prompt.ids) - 1 : -1]
        found = logits.log_softmax(-1).gather(-1, torch.tensor(row.response)[:, None])[:, 0]
        trained = torch.tensor(row.mask).bool()
        assert (found[trained] - torch.tensor(row.log_probs)[trained]).abs().max() < 1e-3
