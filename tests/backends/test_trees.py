"""Episodes of several sequences in micro-batches: what they share is computed once, and gradients do not change."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.backends.micro_batches import partition
from strop.backends.trees import common_beginning, partition_trees
from strop.config.schema.model import OptimConfig
from strop.models.packing import lay_out, rectangle
from strop.ppo.episodes.rows import rows_of_episodes
from strop.types import Batch, Trajectory, batch_of
from tests.agents.endpoint.clients import Client, run_agent
from tests.agents.stage import TOKENIZER, ScriptedEngine, prompt
from tests.backends.make import single
from tests.models.tiny import tiny_model

Message = dict[str, Any]


async def rewriting_agent(client: Client) -> None:
    """Drops tool results, summarises, and asks a sub-agent."""
    system = {"role": "system", "content": "You work step by step and keep notes."}
    task: Message = {"role": "user", "content": "Find the number in the files below."}
    messages = [system, task]
    for place in range(3):
        answer = await client.chat(messages)
        messages += [{"role": "assistant", "content": answer["content"]}]
        messages += [{"role": "user", "content": f"file {place}: " + "data " * 4}]
    await client.chat([*messages[:3], {"role": "user", "content": "(dropped)"}, *messages[4:]])
    await client.chat([*messages[:5], {"role": "user", "content": "Another way?"}])
    await client.chat([system, task, {"role": "user", "content": "A note: the second file."}])


def episodes(count: int) -> list[Trajectory]:
    """Scored episodes of the agent, each with several sequences."""
    chance = random.Random(0)
    engine = ScriptedEngine(lambda said, number: f"answer {chance.randrange(10**6)}")
    rows = [prompt(agent="agent", index=index) for index in range(count)]
    found = run_agent(rewriting_agent, engine, *rows, response_length=1500)
    samples = []
    for place, episode in enumerate(found):
        assert episode.error is None
        sample = episode.trajectory()
        sample.score = float(place)
        assert len(sample.branches) >= 2
        samples.append(sample)
    return samples


@pytest.fixture(scope="module")
def batch() -> Batch:
    made = batch_of(rows_of_episodes(episodes(2), "shared"))
    generator = torch.Generator().manual_seed(1)
    return made.replace(advantages=torch.randn(made.mask.shape, generator=generator))


def unique_tokens(sequences: list[torch.Tensor]) -> int:
    """Tokens of which the beginning up to them is new."""
    return len({tuple(s[: end + 1].tolist()) for s in sequences for end in range(len(s))})


def test_what_an_episode_shares_is_computed_once(batch: Batch) -> None:
    assert batch.episodes is not None
    parts = partition(batch, MicroBatching(max_tokens=4096))
    assert sorted(row for part in parts for row in part) == list(range(len(batch)))
    computed = unique = 0
    for part in parts:
        inputs = lay_out(rectangle([batch.sequences[row] for row in part]), packed=True)
        computed += inputs.ids.numel()
    for episode in set(batch.episodes.tolist()):
        members = (batch.episodes == episode).nonzero()[:, 0].tolist()
        assert any(set(members) <= set(part) for part in parts), "an episode stays together"
        unique += unique_tokens([batch.sequences[row] for row in members])
    assert computed <= 1.05 * unique and sum(batch.lengths) > 1.5 * unique


@pytest.mark.parametrize(
    "micro", [MicroBatching(max_tokens=4096), MicroBatching(rows=2)], ids=["tokens", "rows"]
)
def test_the_gradients_of_a_tree_are_those_of_its_branches_alone(batch: Batch, micro: MicroBatching) -> None:
    def loss(outputs: Any, rows: Batch) -> Any:
        value = -(outputs.log_probs * rows.advantages * rows.mask).sum()
        return value, {"loss": value.detach()}

    def gradients(pieces: list[Batch]) -> dict[str, torch.Tensor]:
        model = tiny_model(vocab_size=len(TOKENIZER), max_position_embeddings=2048).double()
        backend = single(model, optim=OptimConfig(), compute=torch.float64, master=torch.float64)
        for piece in pieces:
            backend.forward_backward(piece, ["log_probs"], loss, micro)
        return {name: p.grad.clone() for name, p in backend.module.named_parameters() if p.grad is not None}

    together = gradients([batch])
    apart = gradients([batch.select([row]).replace(episodes=None) for row in range(len(batch))])
    assert together and together.keys() == apart.keys()
    for name, gradient in together.items():
        worst = float((gradient - apart[name]).abs().max() / apart[name].abs().max())
        assert worst < 1e-6, name  # sums of fp32 log-probs in another order


@pytest.mark.parametrize(("rows", "max_tokens"), [(2, None), (3, None), (99, 9), (99, 14), (99, 1)])
def test_parts_keep_their_limits(rows: int, max_tokens: int | None) -> None:
    sequences = [
        torch.tensor(s) for s in ([1, 2, 3, 4], [1, 2, 3, 5, 6], [9, 8], [1, 2, 7], [9, 8, 7], [4] * 12)
    ]
    episodes = [0, 0, 1, 0, 1, 2]
    parts = partition_trees(sequences, episodes, rows=rows, max_tokens=max_tokens)
    assert sorted(row for part in parts for row in part) == list(range(6))
    for part in parts:
        tokens = unique_tokens([sequences[row] for row in part])
        assert len(part) == 1 or (len(part) <= rows and (max_tokens is None or tokens <= max_tokens))


def test_common_beginnings() -> None:
    one = torch.tensor([1, 2, 3])
    assert common_beginning(one, torch.tensor([1, 2, 4, 5])) == 2
    assert (
        common_beginning(one, torch.tensor([1, 2, 3, 5])) == 3
        and common_beginning(one, torch.tensor([7])) == 0
    )
