"""Trajectories that came as arrays are the trajectories that were sent, and nobody makes lists of them on the way."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import pytest
import torch

from strop.algorithms.metrics.training import staleness
from strop.ppo.rank_sharing import PackedTrajectories, RankScorer, ReceivedTrajectory
from strop.quickstart.tiny_model import tiny_tokenizer
from strop.ranks import Ranks
from strop.rewards.scorer import Scorer, Shaping
from strop.types import Batch, Prompt, TokenArrays, Trajectory, Turn, batch_of

PROMPTS = {i: Prompt(i, [1, 2, 3 + i], [], "x") for i in range(3)}


def made() -> list[Trajectory]:
    """With what a tool wrote, a reward on the way, a failure and an empty answer."""
    turns = [Turn("assistant", 0, 2), Turn("tool", 2, 3)]
    return [
        Trajectory(
            PROMPTS[0],
            0,
            [7, 8, 9],
            [1, 1, 0],
            [-0.5, -0.25, 0.0],
            score=1.0,
            turn_rewards={1: 0.1},
            turns=turns,
        ),
        Trajectory(
            PROMPTS[0], 0, [5], [1], [-2.0], score=0.1, turn_rewards={0: 0.2}, version=4, versions=[(3, 1)]
        ),
        Trajectory(PROMPTS[1], 1, [6, 6], [1, 1], [-1.0, -1.5], "error", extras={"a": [1]}),
        Trajectory(PROMPTS[2], 2, [], [], [], score=0.5, baseline=0.25),
    ]


def sent(trajectories: list[Trajectory]) -> list[Trajectory]:
    return list(pickle.loads(pickle.dumps(PackedTrajectories.pack(trajectories, PROMPTS))).unpack(PROMPTS))


def lists_of(trajectory: Trajectory) -> set[str]:
    return vars(trajectory).keys() & set(TokenArrays._fields)


def test_a_parcel_brings_everything_also_when_it_is_sent_on():
    assert sent(made()) == made() == sent(sent(made()))
    assert sent([]) == []
    assert sent(made())[0].response == [7, 8, 9] and isinstance(sent(made())[0].response[0], int)
    assert sent(made())[0] != made()[1]


def test_a_prompt_that_the_agent_loop_replaced_and_further_sequences_arrive():
    """The prompts of the data are known to every rank; others must be sent."""
    sample = made()[0]
    sample.prompt = replace(PROMPTS[0], ids=[4, 4])
    sample.branches = [replace(made()[1], prompt=replace(PROMPTS[0], ids=[9]))]
    [arrived] = sent([sample])
    assert arrived == sample and arrived.prompt.ids == [4, 4] and arrived.branches[0].prompt.ids == [9]


def test_a_batch_of_arrays_is_that_of_lists_and_makes_no_lists():
    arrived = [copy.copy(t) for t in sent(made())]
    found, expected = batch_of(arrived), batch_of(made())
    for field in fields(Batch):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, list):
            assert [s.tolist() for s in ours] == [s.tolist() for s in theirs] and ours[0].dtype == torch.int64
        else:
            assert (ours is None and theirs is None) or torch.equal(ours, theirs), field.name
    assert staleness(arrived, 5) == staleness(made(), 5)
    assert not any(lists_of(t) for t in arrived)
    assert found.scores is not None and found.scores[0].tolist() == pytest.approx([0.0, 0.1, 1.0])
    assert float(found.scores[1, 0]) == pytest.approx(0.1 + 0.2)


def test_a_list_that_was_asked_for_or_set_is_what_counts():
    arrived = sent(made())[0]
    assert isinstance(arrived, ReceivedTrajectory) and not lists_of(arrived)
    arrived.mask = [0, 0, 0]
    assert (
        arrived.sampled == 0
        and arrived.arrays.mask.tolist() == [0, 0, 0]
        and arrived.arrays.response.tolist() == [7, 8, 9]
    )
    other = sent(made())[0]
    other.response[1] = 99
    assert other.arrays.response.tolist() == [7, 99, 9] == replace(other, group=3).response
    with pytest.raises(AttributeError, match="nothing"):
        other.nothing  # noqa: B018


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """A rank in a thread: what is gathered is a copy, as from another process."""

    board: dict[int, bytes] = dataclasses.field(default_factory=dict)
    barrier: threading.Barrier = dataclasses.field(default_factory=lambda: threading.Barrier(1))

    def all_gather_object(self, value):
        self.board[self.rank] = pickle.dumps(value)
        self.barrier.wait()
        found = [pickle.loads(self.board[rank]) for rank in range(self.world)]
        self.barrier.wait()
        return found


class Given:
    def score(self, samples):
        return [float(sample.trajectory.group) for sample in samples]


def test_every_rank_knows_the_scores_of_all_before_and_after_penalties():
    """Dynamic sampling on one rank would otherwise keep other prompts than on the next."""
    board, barrier = {}, threading.Barrier(2)
    answers = [
        [Trajectory(PROMPTS[group], group, [5] * 10, [1] * 10, [-1.0] * 10) for group in range(3)]
        for _ in range(2)
    ]

    def work(rank):
        shaping = Shaping(overlong_buffer=4, max_response_length=10)
        scorer = Scorer(tiny_tokenizer(), manager=Given(), shaping=shaping)
        RankScorer(scorer, ThreadRanks(rank, 2, board, barrier)).score(answers[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    for found in answers:
        assert [t.score for t in found] == [-1.0, 0.0, 1.0]
        assert [t.unpenalized for t in found] == [0.0, 1.0, 2.0]
