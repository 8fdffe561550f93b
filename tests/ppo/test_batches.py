"""Trajectories as tensors: where scores stand, what is masked, and what stays together when rows are chosen and joined."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strop.types import Batch, ImageInput, Prompt, Trajectory, batch_of, join_experts

IMAGE = ImageInput("a", {}, 1)


def row(group, mask, score, prompt=2, **more):
    made = Prompt(group, list(range(10, 10 + prompt)), [], "s", images=more.pop("images", ()))
    count = len(mask)
    tokens = (list(range(50, 50 + count)), list(mask), [-0.5 * on for on in mask])
    return Trajectory(made, group, *tokens, score=score, **more)


def trajectories(**more):
    return [
        row(4, [1, 0, 1], 2.0, turn_rewards={0: 0.25, 2: 0.5}, **more),
        row(4, [1, 1], None, prompt=1, turn_rewards={0: 9.0}, **more),
        row(7, [], 3.0, prompt=3, **more),
        row(7, [1, 1, 1, 1], -1.0, **more),
        row(8, [1], None, **more),
    ]


def test_rewards_stand_on_their_tokens_and_failed_samples_are_masked_alone():
    batch = batch_of(trajectories())
    assert batch.scores.tolist() == [[0.25, 0, 2.5, 0], [9, 0, 0, 0], [0] * 4, [0, 0, 0, -1], [0] * 4]
    assert batch.mask.tolist() == [[1, 0, 1, 0], [0] * 4, [0] * 4, [1] * 4, [0] * 4]
    assert batch.rollout_log_probs[0].tolist() == [-0.5, 0, -0.5, 0]
    assert batch.groups.tolist() == [4, -1, 7, 7, -2], "those without a score belong to no group"
    assert [sequence.tolist() for sequence in batch.sequences[:3]] == [
        [10, 11, 50, 51, 52],
        [10, 50, 51],
        [10, 11, 12],
    ]
    assert batch.lengths == [5, 3, 3, 6, 3] and batch.response_lengths.tolist() == [3, 2, 0, 4, 1]
    assert batch.row_ids.tolist() == [0, 1, 2, 3, 4]
    assert batch.baselines is batch.episodes is batch.samples is batch.experts is batch.images is None
    full = batch_of(trajectories(baseline=0.5, episode=3, sample=2))
    assert full.baselines.tolist() == [0.5] * 5 and full.episodes.tolist() == [3] * 5
    assert full.samples.tolist() == [2] * 5
    partly = batch_of([row(0, [1], 1.0, baseline=0.5, images=(IMAGE,)), row(0, [1], 1.0)])
    assert partly.baselines is None and partly.images == [(IMAGE,), ()]
    assert batch_of([row(0, [], 1.0)]).scores.shape == (1, 0)
    assert [t.reward for t in trajectories()] == [2.75, None, 3.0, -1.0, None]
    assert [t.sampled for t in trajectories()] == [2, 2, 0, 4, 1]


def test_chosen_rows_keep_their_fields_and_lose_empty_columns():
    batch = batch_of([*trajectories()[:3], row(9, [1, 1, 1, 1], 1.0, images=(IMAGE,))])
    batch = batch.replace(teacher_top_ids=torch.arange(4 * 4 * 2).view(4, 4, 2))
    found = batch.select([2, 0])
    assert found.mask.tolist() == [[0, 0, 0], [1, 0, 1]] and found.row_ids.tolist() == [2, 0]
    assert found.prompt_lengths.tolist() == [3, 2] and found.lengths == [3, 5]
    assert found.images == [(), ()] and batch.select(torch.tensor([3])).images == [(IMAGE,)]
    assert torch.equal(found.teacher_top_ids, batch.teacher_top_ids[[2, 0], :3])
    assert batch.select([]).mask.shape == (0, 0)

    joined = Batch.concat([found, batch.select([3, 1])])
    assert joined.row_ids.tolist() == [2, 0, 3, 1] and joined.lengths == [3, 5, 6, 3]
    again = batch.select([2, 0, 3, 1])
    assert torch.equal(joined.mask, again.mask) and torch.equal(joined.scores, again.scores)
    padded = again.teacher_top_ids.clone()
    padded[:2, 3:] = 0
    assert torch.equal(joined.teacher_top_ids, padded) and joined.images == again.images
    assert joined.values is None
    with pytest.raises(AssertionError, match="teacher_top_ids is missing in some of the 2 pieces"):
        Batch.concat([found, found.replace(teacher_top_ids=None)])


def experts(*tokens):
    return np.array(tokens, dtype=np.int16)[:, None, None] * np.ones((1, 1, 2), dtype=np.int16)


def test_tokens_without_recorded_experts_get_the_first_ones():
    samples = [
        row(0, [1, 1, 1], 1.0, experts=experts(3, 4, 5, 6)),
        row(0, [1], 0.0),
        row(0, [1, 0], 1.0, experts=experts(7, 8)),
    ]
    with pytest.raises(ValueError, match=r"experts of 0 tokens of a sample of row 0, too few .*R2"):
        batch_of(samples)
    samples[1].mask = [0]
    table = batch_of(samples).experts[:, :, 0].tolist()
    first = [0, 1]
    assert table == [
        [[3, 3], [4, 4], [5, 5], [6, 6]],
        [first] * 4,
        [[7, 7], [8, 8], first, first],
    ]
    samples[0].experts = experts(3, 4, 5)
    with pytest.raises(ValueError, match="experts of 3 tokens of a sample of row 0"):
        batch_of(samples)
    samples[0].experts = experts(3, 4, 5, 6, 9)
    assert batch_of(samples).experts[0, :, 0].tolist() == table[0], "the last token is no input"


def test_each_token_keeps_the_experts_with_which_its_successor_was_sampled():
    before, after = experts(1, 2), experts(9, 9, 3)
    assert join_experts(before, after)[:, 0, 0].tolist() == [1, 2, 3]
    assert join_experts(None, after) is after and join_experts(before, None) is before
